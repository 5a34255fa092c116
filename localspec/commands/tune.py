"""`localspec tune`: what was measured of drafting on this machine, from the running engine or the last saved state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from localspec.commands.common import EXIT_WRONG_USE, fail, print_json, settings
from localspec.config import DEFAULT_PORT, Settings

TIMEOUT_S = 15.0


@click.command()
@click.option("--explain", is_flag=True, help="Say what was measured and what it chose. This is also the default.")
@click.option("--reset", is_flag=True, help="Forget it, for all models; running engines start anew.")
@click.option("--url", help=f"A running engine. [default: one that chat started, or port {DEFAULT_PORT}]")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def tune(explain: bool, reset: bool, url: str | None, as_json: bool) -> None:
    """Show or forget what the tuner learnt: tokens per second of each drafter, by kind of text and context."""
    if explain and reset:
        fail("--explain and --reset cannot be given together", EXIT_WRONG_USE)
    config = settings()
    running = _ask_running(config, url, reset)
    saved: list[dict[str, Any]] = []
    removed = 0
    if reset:
        removed = _remove(config.paths.tuner_dir)
    elif running is None:
        saved = _saved(config.paths.tuner_dir)
    if as_json:
        print_json({"running": running, "saved": saved, "removed_files": removed})
    elif reset:
        where = "in the running engine and on disk" if running is not None else "on disk; no engine is running"
        click.echo(f"forgotten {where}")
    else:
        _show(running, saved)


def _show(running: dict[str, Any] | None, saved: list[dict[str, Any]]) -> None:
    if running is not None:
        click.echo(f"{running['url']} (running)")
        for line in running["lines"]:
            click.echo(f"  {line}")
    for entry in saved:
        click.echo(f"{entry['model']} on {entry['device']} ({entry['build']})")
        for line in entry["lines"] or ["nothing measured yet"]:
            click.echo(f"  {line}")
    if running is None and not saved:
        click.echo("nothing is measured yet: the tuner learns while answers are written")


def _ask_running(config: Settings, url: str | None, reset: bool) -> dict[str, Any] | None:
    """The answer of a running engine, or None. Fails where a named one does not answer."""
    import httpx

    from localspec.commands.engine_process import running_engine

    try:
        key = config.paths.key_file.read_text().strip()
    except OSError:
        key = ""
    address = url or running_engine(config) or f"http://127.0.0.1:{DEFAULT_PORT}"
    try:
        reply = httpx.post(
            f"{address.rstrip('/')}/localspec/v1/tuner",
            json={"reset": reset},
            headers={"X-Localspec-Key": key},
            timeout=TIMEOUT_S,
            trust_env=False,
        )
        reply.raise_for_status()
        lines = [str(line) for line in reply.json()["lines"]]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        if url is not None:
            fail(f"{url} does not answer as a localspec engine of this user: {error}")
        return None
    return {"url": address, "lines": lines}


def _saved(folder: Path) -> list[dict[str, Any]]:
    """Every state on disk in words, the newest first."""
    from localspec.engine.tuner_store import read_document, saved_tuner

    files = sorted(folder.glob("*.json"), key=lambda path: -path.stat().st_mtime)
    documents = [document for document in map(read_document, files) if document is not None]
    return [
        {
            "model": str(document["key"].get("model", "")),
            "device": str(document["key"].get("device", "")),
            "build": str(document["key"].get("build", "")),
            "lines": saved_tuner(document).explain(),
        }
        for document in documents
    ]


def _remove(folder: Path) -> int:
    files = list(folder.glob("*.json"))
    for path in files:
        path.unlink(missing_ok=True)
    return len(files)
