"""`armature show`: a recipe's values, or a result and what it was made from."""

from __future__ import annotations

from collections.abc import Sequence

from armature.components.configuration import SUFFIX
from armature.components.contracts.errors import ConfigurationError
from armature.recipe_text import recipe_text

SECONDS = 5.0
"""A person waits for the answer."""


def show(what: str | None, overrides: Sequence[str], most: int, *, describe: bool = False, toml: bool = False) -> None:
    """
    Raises:
        ConfigurationError: `toml` of what is not a recipe.
    """
    if what is not None and ("/" in what or what.endswith(SUFFIX)):
        print(recipe_text(what, overrides, describe=describe, own=toml))
        return
    if toml:
        raise ConfigurationError(
            "only a recipe is shown as TOML",
            code="not_a_recipe",
            where=f"armature show --toml {what or ''}",
            remedy="armature list",
        )
    from armature.tasks.patience import patience

    with patience(SECONDS):
        if what is None:
            _latest_runs()
        else:
            from armature.tasks.lineage import lineage

            print("\n".join(lineage(_whole_digest(what)).lines(most=most)))


def _whole_digest(what: str) -> str:
    """A digest may be shortened to its first characters if the local store has it."""
    from armature.components.contracts.machine import Machine
    from armature.components.stages import open_store

    found = open_store(Machine()).find_digest(what)
    return found.digest if found else what


def _latest_runs() -> None:
    from armature.tasks.mlflow_client import FLOW_RUN_TAG, PARENT_TAG, client

    experiments = [each.experiment_id for each in client().search_experiments()]
    runs = client().search_runs(experiments, max_results=200, order_by=["attributes.start_time DESC"])
    flows = [run for run in runs if FLOW_RUN_TAG in run.data.tags and PARENT_TAG not in run.data.tags]
    for run in flows[:20]:
        print(f"{run.info.run_id}  {run.info.status:<9}  {run.info.run_name}")
    if not flows:
        print("no runs yet; `armature run train-vlm/colors` makes one")
