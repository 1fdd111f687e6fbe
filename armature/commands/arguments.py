"""Arguments and options that several commands share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Optional

import typer


def _recipes(incomplete: str) -> list[str]:
    """Return the names of installed recipes that begin with `incomplete`, for completion in a shell."""
    from armature.components.configuration import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A recipe: <flow>/<deployment>, as `armature list` shows them, or a file: my/recipe.toml.",
        autocompletion=_recipes,
    ),
]
Names = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this annotation at run time)
    typer.Argument(metavar="[RECIPE]...", help="Names or files. Default: all installed recipes."),
]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads this annotation at run time)
    typer.Option(
        "--set", metavar="A.B=VALUE", help="Change a value (TOML syntax; a bare word is a string); A.B= leaves it out."
    ),
]
MachineOverrides = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option("--machine", metavar="KEY=VALUE", help="Change a fact of the machine: --machine servers.count=2."),
]
Force = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(metavar="STAGE", help="Make a stage again, and all that depends on it; repeat for more."),
]
JobVariables = Annotated[
    Optional[list[str]],  # noqa: UP045
    typer.Option(
        "--job-variable",
        metavar="KEY=VALUE",
        help="Change a variable of Kubernetes' pods: --job-variable node_selector.gpu=h200. Repeat for more.",
    ),
]
Store = Annotated[Path, typer.Option(help="Folder of the artifact store.")]


def overrides(settings: list[str] | None, machine: list[str] | None, force: list[str] | None = None) -> list[str]:
    """Return the values of the options `--set`, `--machine` and `--force` as KEY=VALUE overrides of a recipe."""
    forced = [f"machine.force={json.dumps(force)}"] if force else []
    return [*(settings or []), *(f"machine.{each}" for each in machine or []), *forced]
