"""The command `armature`: its groups of subcommands and its exit codes."""

from __future__ import annotations

import os
import sys
from platform import python_version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from armature.commands import models, platform, recipes, results, store
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.installation import DISTRIBUTION, installation_error, installed_version

GROUPS = {
    "Recipes": ("init", "list", "check", "plan", "show", "run", "view", "reproduce", "drill"),
    "Models": ("setup", "train-multimodal", "serve", "serve-policy", "export", "push"),
    "Platform": ("up", "down", "status", "env", "deploy", "submit"),
    "Artifacts": ("stage", "bundle", "verify", "store"),
}
"""Headings of `armature --help` and their commands, in the order that a newcomer needs them."""
LONGEST_HELP = 1000
"""Maximum number of characters in a line of help, and in the sentence of a command: the terminal's width decides."""


class GroupedCommands(TyperGroup):
    """The command group whose help lists the commands under the headings of `GROUPS`."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write a section for each heading, with the name and the short help of its commands."""
        for heading, names in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(LONGEST_HELP)) for name in names])


app = typer.Typer(
    cls=GroupedCommands,
    help="Post-training of vision-language models as flows that can be repeated.",
    epilog="First steps: armature list; armature run train-vlm/colors; armature init my-project",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": LONGEST_HELP},
)
for group in (recipes, results, models, platform, store):
    app.add_typer(group.app)


def _print_version(asked: bool) -> None:
    """Print the version and exit, if the user asked for it with `--version`."""
    if asked:
        print(f"armature {installed_version()} ({DISTRIBUTION}, Python {python_version()})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which release this is.")
    ] = False,
) -> None:
    """Post-training of vision-language models as flows that can be repeated."""


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 failed, 2 invalid configuration or arguments, 130 interrupted."""
    if not sys.stderr.isatty():  # otherwise the libraries' bars are redrawn in a file
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    try:
        app(standalone_mode=True, prog_name="armature")
    except ConfigurationError as error:
        _print_error(error)
        sys.exit(2)
    except ArmatureError as error:
        _print_error(error)
        sys.exit(1)
    except (ImportError, RuntimeError, OSError) as error:
        if (problem := installation_error(error)) is None:
            raise
        _print_error(problem)
        sys.exit(2)


def _print_error(error: ArmatureError) -> None:
    """Print an error with its code and its notes, such as the path of the log."""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    print(f"armature: {error}\n  code: {error.code}{notes}", file=sys.stderr)
