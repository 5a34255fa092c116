"""One pull in a process of its own: `python -m localspec.commands.pull_worker NAME`, progress as JSON lines.

An interface that fetches a model beside a chat must not share its interpreter with hashing and conversion. The process
ends when its standard input does, so it never outlives whoever started it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading

from localspec.commands.common import EXIT_FAILED, catalogue, hub_settings, settings
from localspec.hub.get import Wish, get
from localspec.hub.records import HubError, PullProgress


def main() -> int:
    """Get the model that is named on the command line, with its drafters; a last line `error` says why it failed."""
    threading.Thread(target=_end_with_starter, daemon=True).start()
    config = settings()
    try:
        wish = Wish(sys.argv[1], offline=config.network.offline)
        get(catalogue(config), wish, config.paths.data_dir, hub_settings(config), _say)
    except HubError as error:
        return _fail(str(error))
    except OSError as error:
        where = error.filename or "a file"
        return _fail(f"{where} cannot be written ({error.strerror}); free space or mend its permissions")
    return 0


def _say(progress: PullProgress) -> None:
    print(json.dumps(dataclasses.asdict(progress)), flush=True)


def _fail(message: str) -> int:
    print(json.dumps({"error": message}), flush=True)
    return EXIT_FAILED


def _end_with_starter() -> None:
    sys.stdin.buffer.read()
    os._exit(EXIT_FAILED)


if __name__ == "__main__":
    sys.exit(main())
