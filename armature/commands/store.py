"""`armature verify`: whether every artifact of a store is as it was made, by reading all of it."""

from __future__ import annotations

from pathlib import Path

import typer

from armature.commands.arguments import MachineOverrides, Name, overrides
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import is_folder


def verify(root: Path) -> None:
    """
    Raises:
        ConfigurationError: there is no store.
        DataError: some artifacts are not as they were made.
    """
    if not is_folder(root):
        raise ConfigurationError(
            "there is no artifact store", code="store_missing", where=str(root), remedy="name its folder with --store"
        )
    checked = list(ArtifactStore(root).verify())
    if damaged := [error for _, error in checked if error is not None]:
        raise DataError(
            "\n".join([f"{len(damaged)} of {len(checked)} artifacts are damaged", *map(str, damaged)]),
            code="artifacts_damaged",
        )
    print(f"{len(checked)} artifact{' is as it was' if len(checked) == 1 else 's are as they were'} made")


# Commands that look after the store that several machines share.

app = typer.Typer()
store_app = typer.Typer(help="The remote store of a recipe, machine.remote_store.", no_args_is_help=True)
app.add_typer(store_app, name="store")


@store_app.command(
    epilog="Examples: armature store send train-vlm/molmo2; "
    "armature store send my.toml --machine remote_store=s3://bucket/prefix"
)
def send(name: Name, machine: MachineOverrides = None) -> None:
    """Send what the remote store did not take when it was made, as when it was away. The next run does so as well."""
    from armature.components.configuration import load_recipe
    from armature.components.configuration.stages import open_store
    from armature.components.contracts.errors import ConfigurationError
    from armature.components.contracts.machine import Machine

    facts = load_recipe(name, overrides(None, machine)).sections["machine"]
    assert isinstance(facts, Machine)
    if facts.remote_store is None:
        raise ConfigurationError(
            "there is no remote store",
            code="remote_store_missing",
            where="machine.remote_store",
            remedy="name it: --machine remote_store=URL",
        )
    print(f"sent to {facts.remote_store}: {open_store(facts).settle()} artifacts")
