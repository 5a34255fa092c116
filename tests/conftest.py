"""Fixtures that several packages share. The demo model is fetched once and kept beside the checkout."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

# A shell's background job ignores SIGINT and hands that on; tests that interrupt programs need the ordinary handling.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Torch-free, but made of real processes, terminals, kills or many examples: they run beside the torch tests, so that
# the first answer of the checks comes within a minute.
SLOW_PLACES = (
    "tests/tui/",
    "tests/storage/test_ngram",
    "tests/hub/test_pull",
    "tests/server/test_fuzz",
    "tests/server/test_load",
    "tests/server/test_openapi",
    "tests/server/test_stopping",
    "tests/server/test_openai",
    "tests/api/test_remote",
    "tests/engine/test_tuner",
    "tests/commands/test_engine_process",
    "tests/commands/test_cli",
    "tests/commands/test_ngram",
    "tests/cache/test_spill",
)
TEST_HOME = Path(__file__).parent.parent / ".test-home"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SLOW_PLACES):
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session")
def demo_folder() -> Path:
    """The installed demo model. Fails, never skips, when it cannot be had: real weights are part of the tests."""
    from localspec.commands.common import hub_settings
    from localspec.config import DEMO_MODEL_ID, load_settings
    from localspec.hub.catalogue import load_catalogue
    from localspec.hub.pull import pull
    from localspec.hub.records import HubError

    entry = load_catalogue().find(DEMO_MODEL_ID)
    folder = TEST_HOME / "models" / entry.id
    if not (folder / "localspec.json").is_file():
        try:
            pull(entry, TEST_HOME, hub_settings(load_settings()))
        except HubError as error:  # another test process fetches it
            if "another process" not in str(error):
                raise
            _wait_for(folder / "localspec.json")
    return folder


def _wait_for(path: Path, timeout_s: float = 120.0) -> None:
    import time

    end = time.monotonic() + timeout_s
    while not path.is_file():
        assert time.monotonic() < end, f"{path} did not appear"
        time.sleep(0.2)
