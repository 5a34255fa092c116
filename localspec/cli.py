"""The command line: finds commands by name and imports only the one that runs.

`--help` must come within half a second and without torch, so nothing is imported before it is needed.
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.metadata import PackageNotFoundError, version

import click

from localspec.commands.common import EXIT_FAILED, EXIT_INTERRUPTED
from localspec.config import prepare_process
from localspec.hub.records import HubError

COMMANDS: dict[str, tuple[str, str]] = {
    "chat": ("localspec.commands.chat:chat", "Chat in the terminal."),
    "run": ("localspec.commands.run:run", "Answer one prompt and exit."),
    "serve": ("localspec.commands.serve:serve", "Open the local OpenAI-compatible port."),
    "pull": ("localspec.commands.models:pull", "Get a model."),
    "ls": ("localspec.commands.models:ls", "List models."),
    "show": ("localspec.commands.models:show", "Show what is known of a model."),
    "rm": ("localspec.commands.models:rm", "Remove an installed model."),
    "ngram": ("localspec.commands.ngram:ngram", "Tables of your own text to draft from."),
    "cache": ("localspec.commands.cache:cache", "What is kept of conversations on disk."),
    "verify": ("localspec.commands.library:verify", "Hash the files of installed models."),
    "prune": ("localspec.commands.library:prune", "Remove unfinished pulls."),
    "df": ("localspec.commands.library:df", "Show disk use."),
    "import": ("localspec.commands.library:import_", "Install a model from a file or folder."),
    "doctor": ("localspec.commands.doctor:doctor", "Check this machine."),
    "bench": ("localspec.commands.bench:bench", "Measure drafting against plain decoding."),
    "train-draft": ("localspec.commands.train_draft:train_draft", "Train a drafter for a model."),
    "adapt": ("localspec.commands.adapt:adapt", "Fine-tune drafters on your own chats, if you agree."),
    "tune": ("localspec.commands.tune:tune", "Show or forget what was measured of drafting."),
    "connect": ("localspec.commands.connect:connect", "Set an editor or agent up for the port, and undo it."),
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module_name, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module_name), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _version() -> str:
    try:
        return version("localspec")
    except PackageNotFoundError:
        return "unknown"


@click.group(cls=LazyGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="localspec")
@click.pass_context
def group(context: click.Context) -> None:
    """Local inference for one GPU: drafts ahead, proves every token, shows what it gains.

    Without a command: the chat, and on the first start a model that suits this machine.
    """
    if context.invoked_subcommand is not None:
        return
    if sys.stdin.isatty() and sys.stdout.isatty():
        from localspec.commands.chat import chat

        chat.main(args=[], prog_name="localspec chat", standalone_mode=False)
    else:
        click.echo(context.get_help())


def main() -> None:
    """Entry point. Exit codes: 0 done, 1 failed, 2 wrong use, 3 this machine cannot, 130 interrupted."""
    prepare_process()
    try:
        group.main(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("localspec: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except HubError as error:
        click.echo(f"localspec: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else "output: "
        click.echo(f"localspec: {where}{error.strerror or error}", err=True)
        os._exit(EXIT_FAILED)  # buffered output that cannot be written would raise again at exit


if __name__ == "__main__":
    main()
