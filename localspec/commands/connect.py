"""`localspec connect`: tells an editor or agent where the port is, or says how; every change can be taken back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from localspec.commands.common import EXIT_WRONG_USE, default_model, fail, print_json, settings
from localspec.commands.connect_clients import CLIENTS, Address, Client
from localspec.commands.connect_files import CannotWrite, Ledger, read_text
from localspec.config import DEFAULT_PORT

CONTEXT_TOKENS = 32768
ASK_S = 2.0


@click.command()
@click.argument("client", type=click.Choice(list(CLIENTS), case_sensitive=False), required=False)
@click.option("--write", is_flag=True, help="Change the client's configuration file; a copy is kept.")
@click.option("--undo", is_flag=True, help="Take back what --write did, byte for byte.")
@click.option("--url", default=f"http://127.0.0.1:{DEFAULT_PORT}", show_default=True, help="Where the port is.")
@click.option("--model", help="Model name to send. [default: the one that the port serves, else the installed one]")
@click.option("--api-key", default="localspec", help="The port's key; any word if it has none.")
@click.option(
    "--context", type=click.IntRange(1024), help=f"Tokens to plan. [default: the port's, else {CONTEXT_TOKENS}]"
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def connect(client: str | None, write: bool, undo: bool, as_json: bool, **options: Any) -> None:
    """Set an editor or agent up for the local port. Without --write it only says what to set."""
    if write and undo:
        fail("--write and --undo cannot be given together", EXIT_WRONG_USE)
    config = settings()
    ledger = Ledger(config.paths.data_dir / "connect")
    if client is None:
        if write or undo:
            fail("name the client: " + ", ".join(CLIENTS), EXIT_WRONG_USE)
        _list(ledger, as_json)
        return
    chosen = CLIENTS[client.lower()]
    if undo:
        _undo(chosen, ledger, as_json)
        return
    parts = urlsplit(options["url"])
    if parts.scheme not in ("http", "https") or not parts.netloc:
        fail("--url must be an address like http://127.0.0.1:8012", EXIT_WRONG_USE)
    base = f"{parts.scheme}://{parts.netloc}"
    served = _served(base, options["api_key"]) if not (options["model"] and options["context"]) else _Served()
    address = Address(
        base,
        options["model"] or served.model or default_model(config),
        options["api_key"],
        options["context"] or served.context_tokens or CONTEXT_TOKENS,
    )
    if write:
        _write(chosen, address, ledger, as_json)
    else:
        _say(chosen, address, as_json)


@dataclass(frozen=True)
class _Served:
    """What a running port says of its model; empty where there is none."""

    model: str = ""
    context_tokens: int = 0


def _served(base: str, key: str) -> _Served:
    """Ask the port, if one listens: a client that plans for more than the context holds loses the end of long chats."""
    import httpx

    try:
        reply = httpx.get(
            f"{base}/v1/models", headers={"authorization": f"Bearer {key}"}, timeout=ASK_S, trust_env=False
        )
        entry = reply.json()["data"][0]
        model, context_tokens = entry["id"], entry["context_length"]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, LookupError, TypeError):
        return _Served()
    if not isinstance(model, str) or type(context_tokens) is not int or context_tokens < 1:
        return _Served()
    return _Served(model, context_tokens)


def _list(ledger: Ledger, as_json: bool) -> None:
    written = {name: ledger.record(name) is not None for name in CLIENTS}
    if as_json:
        print_json([{"client": name, "written": written[name], "can_write": CLIENTS[name].piece is not None}
                    for name in CLIENTS])  # fmt: skip
        return
    for name, client in CLIENTS.items():
        click.echo(f"{name:12} {client.title}{' (written)' if written[name] else ''}")


def _say(client: Client, address: Address, as_json: bool) -> None:
    path = client.path(Path.home()) if client.path is not None else None
    content, problem = "", ""
    if path is not None and client.piece is not None:
        try:
            before = read_text(path) if path.exists() else ""
            content = client.piece(before, address).text.strip("\n")
        except CannotWrite as error:
            problem = str(error)
    if as_json:
        print_json(
            {
                "client": client.name,
                "steps": list(client.steps(address)),
                "path": str(path) if path is not None else None,
                "insert": content or None,
                "problem": problem or None,
            }
        )
        return
    for line in client.steps(address):
        click.echo(line)
    if content:
        click.echo(f"\nWith --write, this goes into {path}:\n{content}")
    elif problem:
        click.echo(f"\n--write cannot do it: {problem}")


def _write(client: Client, address: Address, ledger: Ledger, as_json: bool) -> None:
    if client.path is None or client.piece is None:
        fail(f"{client.title} has no file that localspec could write; see: localspec connect {client.name}")
    if ledger.record(client.name) is not None:
        fail(f"{client.title} is set up already; to do it anew: localspec connect {client.name} --undo")
    path = client.path(Path.home())
    try:
        existed = path.exists()
        before = read_text(path) if existed else ""
        piece = client.piece(before, address)
        if not before.strip() and path.suffix in (".json", ".jsonc"):
            # The piece was made for an empty object; the braces come with it.
            piece = type(piece)(len(before), "{" + piece.text + "}\n")
        record = ledger.write(client.name, path, piece, before, existed)
    except (CannotWrite, OSError) as error:
        fail(f"{path}: {error}")
    if as_json:
        print_json({"client": client.name, "path": record.path, "created": record.created, "backup": record.backup})
    else:
        click.echo(f"wrote {record.path}; take it back with: localspec connect {client.name} --undo")


def _undo(client: Client, ledger: Ledger, as_json: bool) -> None:
    try:
        record = ledger.undo(client.name)
    except (CannotWrite, OSError) as error:
        fail(str(error))
    if as_json:
        print_json({"client": client.name, "path": record.path, "removed_file": record.created})
    else:
        click.echo(f"{record.path} is as it was")
