"""Commands for the remote store that several machines share."""

from __future__ import annotations

import typer

from armature.commands.arguments import MachineOverrides, Name, overrides

app = typer.Typer()
store_app = typer.Typer(help="The remote store of a recipe, machine.remote_store.", no_args_is_help=True)
app.add_typer(store_app, name="store")


@store_app.command(
    epilog="Examples: armature store send train-vlm/molmo2; "
    "armature store send my.toml --machine remote_store=s3://bucket/prefix"
)
def send(name: Name, machine: MachineOverrides = None) -> None:
    """Send artifacts that could not be sent to the remote store when they were made. The next run does so as well."""
    from armature.components.configuration import load_recipe
    from armature.components.configuration.stages import open_store
    from armature.components.contracts.errors import ConfigurationError
    from armature.components.contracts.machine import Machine

    section = load_recipe(name, overrides(None, machine)).sections["machine"]
    assert isinstance(section, Machine)
    if section.remote_store is None:
        raise ConfigurationError(
            "there is no remote store",
            code="remote_store_missing",
            where="machine.remote_store",
            remedy="name it: --machine remote_store=URL",
        )
    print(f"sent to {section.remote_store}: {open_store(section).send_waiting()} artifacts")
