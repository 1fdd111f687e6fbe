"""The MLflow run of a flow run. Every task of the flow finds it by the flow run's id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from prefect.blocks.system import Secret
from prefect.context import TagsContext
from prefect.runtime import deployment, flow_run
from pydantic import BaseModel

from armature.components.configuration.recipes import Sections
from armature.components.configuration.trackers import refuse_missing_trackers
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.secrets import BLOCKS, BlockReference
from armature.components.inference.own_servers import keep_servers
from armature.tasks import mlflow_client as names
from armature.tasks.killed_runs import alive
from armature.tasks.logs import readable_errors
from armature.tasks.mlflow_client import client, experiment_id
from armature.tasks.prometheus import serve_metrics
from armature.tasks.tracking import TrackedRun, tracked

DEPLOYMENT_TAG = "deployment:"


@dataclass
class Provenance:
    """Fingerprints of the artifacts that one flow run has used so far, and the places of its runs in trackers."""

    made: set[str] = field(default_factory=set)
    """Fingerprints of artifacts that the flow run made."""
    reused: set[str] = field(default_factory=set)
    """Fingerprints of artifacts that were in the store already."""
    remade: set[str] = field(default_factory=set)
    """Fingerprints of artifacts that were in the store, and were made again because of `machine.force`."""
    trackers: dict[str, str] = field(default_factory=dict)
    """Names of trackers by place. A place is where a tracker shows the run of a stage: a URL or a command."""


_provenance_by_flow_run: dict[str, Provenance] = {}


def provenance() -> Provenance:
    """Return the `Provenance` of the current flow run."""
    return _provenance_by_flow_run.setdefault(str(flow_run.id), Provenance())


def deployment_name() -> str:
    """Return the name of the deployment or recipe that this flow run runs.

    Prefect knows the deployment of a submitted run. `armature run` puts the recipe's name into a tag. If there is
    neither, the name is "custom".
    """
    if deployment.name:
        return str(deployment.name)
    marked = [tag.removeprefix(DEPLOYMENT_TAG) for tag in flow_run.tags if tag.startswith(DEPLOYMENT_TAG)]
    return marked[0] if marked else "custom"


@contextmanager
def tracked_flow(recipe: Sections) -> Iterator[TrackedRun]:
    """Open the flow's parent run in MLflow, with the recipe's sections as parameters. Its stages share model servers.

    Tasks do not inherit the tags of the flow run. Before each task, Prefect would ask its server for a concurrency slot
    of every tag, and the server, on SQLite, answers some of these requests with an error that costs 2 s.

    Raises:
        ConfigurationError: an environment variable or a Prefect block that the machine's settings name does not exist,
            a tracker's package is missing, or nothing can listen at `machine.metrics`.
    """
    readable_errors()
    machine, sections = recipe.machine, recipe.given()
    read_blocks(sections)
    machine.server_variables(), machine.trainer_variables()  # a missing variable is an error now, not hours later
    refuse_missing_trackers(machine.report_to)
    tags = {names.FLOW_RUN_TAG: str(flow_run.id), "armature.deployment": deployment_name()}
    name = f"{deployment_name()}-{flow_run.name}"
    with (
        alive(str(flow_run.id)),
        TagsContext(current_tags=set()),
        serve_metrics(machine.metrics, machine.store),
        keep_servers(),
        tracked(flow_run.flow_name, name, tags, sections) as run,
    ):
        yield run


def read_blocks(sections: Mapping[str, BaseModel]) -> None:
    """Load every Prefect Secret block that the settings name, so that stages can read its value.

    Raises:
        ConfigurationError: Prefect has no Secret block of that name.
    """
    for name, where in _blocks({section: settings.model_dump(mode="json") for section, settings in sections.items()}):
        try:
            BLOCKS[name] = str(cast(Secret[Any], Secret.load(name, _sync=True)).get())  # type: ignore[call-arg]
        except ValueError as error:
            raise ConfigurationError(
                f"Prefect has no Secret block {name!r}",
                code="secret_block_missing",
                where=where,
                remedy="make it on the page Blocks of the dashboard",
            ) from error


def _blocks(value: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield the name of each Secret block to which nested settings refer, with the dotted key of the setting.

    `where` is the dotted key of `value`.
    """
    if isinstance(value, Mapping):
        if set(value) == set(BlockReference.model_fields):
            yield value["prefect_secret"], where
            return
        for key, item in value.items():
            yield from _blocks(item, f"{where}.{key}" if where else key)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _blocks(item, f"{where}.{index}")


def current_run() -> TrackedRun | None:
    """Return the MLflow run of the current flow run, or None if MLflow has none."""
    experiment = experiment_id(str(flow_run.flow_name))
    runs = client().search_runs(
        [experiment],
        f"tags.`{names.FLOW_RUN_TAG}` = '{flow_run.id}' and tags.`armature.deployment` != ''",
        order_by=["attributes.start_time DESC"],
        max_results=1,
    )
    return TrackedRun(runs[0].info.run_id, experiment) if runs else None
