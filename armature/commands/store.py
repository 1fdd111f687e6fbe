"""Commands that look after the store that several machines share."""

from __future__ import annotations

from typing import Annotated

import typer

from armature.commands.arguments import MachineOverrides, Name, overrides

app = typer.Typer()
store_app = typer.Typer(help="The remote store of a recipe, machine.remote_store.", no_args_is_help=True)
app.add_typer(store_app, name="store")


@store_app.command(
    epilog="Examples: armature store gc train-vlm/molmo2 --dry-run; "
    "armature store gc my.toml --machine remote_store=s3://bucket/prefix --days 30"
)
def gc(
    name: Name,
    days: Annotated[int, typer.Option(min=1, help="Keep what changed in the last so many days.")] = 7,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be deleted.")] = False,
    machine: MachineOverrides = None,
) -> None:
    """Delete what the remote store holds and nothing needs.

    Artifacts that arrived in part, checkpoints of finished trainings, uploads that were not completed, and images that
    no artifact shows. Artifacts stay, and so does the newest checkpoint of a training that is not finished.
    """
    from armature.components.configuration import load_recipe
    from armature.components.contracts.machine import Machine
    from armature.garbage import collect

    facts = load_recipe(name, overrides(None, machine)).sections["machine"]
    assert isinstance(facts, Machine)
    collect(facts, days, dry_run)
