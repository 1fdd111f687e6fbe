"""`armature plan`: what a recipe would take on many GPUs, simulated before they are rented."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from components.configuration import Recipe, explain, read_toml
from components.contracts.errors import ConfigurationError
from components.contracts.machine import Machine
from components.environments import ENVIRONMENTS
from components.planning.costs import Costs, FlowCosts, ServerCosts, TrainerCosts
from components.planning.geometry import geometry, read_config
from components.planning.gpus import GIB, GPUS
from components.planning.layout import Planner
from components.planning.records import measured_run, read_run, workload_of
from components.planning.simulate import SimulatedRun
from components.planning.walls import first_wall
from components.planning.workload import Workload, WorkloadSettings, drawn
from components.project import project
from components.registry import suggestion
from components.rl.settings import TrainVLMSettings

SIZES = (8, 64, 512, 4096)
NO_COSTS = Costs(
    servers=ServerCosts(pass_seconds=0.0, token_seconds=0.0),
    trainer=TrainerCosts(token_seconds=0.0),
    flow=FlowCosts(request_seconds=0.0),
    sync_seconds=0.0,
)
SHOWN = ("wait_for_rollouts", "batch", "train", "sync", "step")


def plan_recipe(
    recipe: Recipe, gpus: Sequence[int], gpu: str, records: Path | None, given: Path | None, price: float | None
) -> Iterator[str]:
    """The lines of the plan.

    Args:
        gpus: how many there are; none: `SIZES`, or the run of `records` as it was.
        gpu: key of `GPUS`.
        records: artifact of a finished train-vlm.
        given: file of costs and of the table `workload`.
        price: of a GPU for an hour.

    Raises:
        ConfigurationError: a recipe without rollouts, an unknown GPU or cost, or a model that does not fit.
        DataError: the model's configuration or the run cannot be read.
    """
    if recipe.flow != "train-vlm":
        raise ConfigurationError(
            f"{recipe.flow} has no rollouts on model servers, which is what is planned",
            where=recipe.name,
            remedy="give a recipe of train-vlm",
        )
    settings, machine = recipe.settings_for(TrainVLMSettings), recipe.sections["machine"]
    assert isinstance(settings, TrainVLMSettings) and isinstance(machine, Machine)
    costs, described = _given(given)
    if records is not None and not gpus:
        yield from _as_measured(recipe.name, settings, machine, records, costs, given)
        return
    if gpu not in GPUS:
        raise ConfigurationError(f"no GPU is called {gpu!r}", where="--gpu", remedy=suggestion(gpu, GPUS))
    with project(recipe.folder):
        sizes = geometry(read_config(settings.model), settings.model, settings.trainer, settings.inference.dtype)
    workload = workload_of(read_run(records)) if records else _described(settings, described, given)
    planner = Planner(settings, machine, sizes, GPUS[gpu], workload, (costs, f"given: {given}"))
    plan = settings.rollouts
    mode = "in turn"
    if plan.max_staleness:
        mode = f"{plan.max_staleness} ahead" + ", updates in flight" * plan.in_flight_updates
    yield f"{recipe.name}: {sizes.parameters / 1e9:.2f} billion parameters on {gpu}, simulated"
    yield f"a step: {plan.groups_per_step} groups of {plan.group_size}, {mode}"
    yield f"episodes: {workload.source}"
    yield ""
    paid = ["$ per 1,000"] if price is not None else []
    rows = [["GPUs", "servers", "ranks", "step", "rollouts/s", "GPU s each", *paid]]
    rows[0] += ["servers busy", "sequences", "trainer busy", "server GiB", "rank GiB", "first wall"]
    last: Costs | None = None
    for count in gpus or SIZES:
        try:
            layout, run, found = planner.plan(count)
        except ConfigurationError as error:
            if len(gpus) == 1:
                raise
            rows.append([f"{count:,}", *[""] * (len(rows[0]) - 2), error.what])
            continue
        wall, gain = first_wall(run, found)
        cost = [f"{found.gpu_seconds / 3600 * price * 1000:,.2f}"] if price is not None else []
        tensor = f" x {layout.gpus_per_server}" if layout.gpus_per_server > 1 else ""
        last = run.costs
        rows.append(
            [
                f"{count:,}",
                f"{layout.servers:,}{tensor}",
                f"{layout.ranks:,}",
                f"{found.step_seconds:,.1f} s",
                f"{found.samples_per_step / found.step_seconds:,.1f}",
                f"{found.gpu_seconds:,.2f}",
                *cost,
                f"{found.server_share:.0%}",
                f"{found.sequences_per_server:.0f}",
                f"{found.trainer_share:.0%}",
                f"{layout.server_bytes / GIB:.0f}",
                f"{layout.trainer_bytes / GIB:.0f}",
                f"{wall} ({gain:.0%} of the cost)" if wall else "none: servers and trainer compute",
            ]
        )
    yield from _table(rows)
    if last is not None:
        yield ""
        yield "what this rests on, for the last row:"
        yield from (f"  {line}" for line in last.lines())
    yield ""
    yield "not simulated: evaluations, the start of servers and trainer, the time to make micro-batches of images"


def _as_measured(
    name: str, settings: TrainVLMSettings, machine: Machine, folder: Path, costs: Mapping[str, Any], given: Path | None
) -> Iterator[str]:
    """The recipe on the machine of a run, by the costs of that run; beside its own steps, if it is that recipe."""
    records = read_run(folder)
    base = measured_run(records, machine)
    base = replace(base, costs=base.costs.replaced(costs, f"given: {given}"))
    run: SimulatedRun = replace(base, rollouts=settings.rollouts, batches=settings.batches, trainer=settings.trainer)
    found = run.simulate()
    same = settings.rollouts == records.settings.rollouts and settings.batches == records.settings.batches
    yield f"{name} on the machine of {folder}, simulated by its costs"
    yield ""
    rows = [["seconds", "predicted", *(["measured", "difference"] if same else [])]]
    for part in SHOWN:
        predicted = found.timings[f"timing/{part}"]
        row = [part, f"{predicted:.2f}"]
        if same:
            measured = records.mean(f"timing/{part}")
            row += [f"{measured:.2f}", f"{predicted / measured - 1:+.1%}" if measured else ""]
        rows.append(row)
    yield from _table(rows)
    yield ""
    yield (
        f"busy: servers {found.server_share:.0%}, trainer {found.trainer_share:.0%}, event loop of the flow process "
        f"{found.flow_share:.0%} of the time"
    )
    yield ""
    yield "what this rests on:"
    yield f"  {'episodes':<32} {'':>10}  {run.workload.source}"
    yield from (f"  {line}" for line in run.costs.lines())


def _given(file: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The costs and the workload of a file.

    Raises:
        ConfigurationError: it cannot be read, or has an unknown cost.
    """
    values = dict(read_toml(file)) if file is not None else {}
    workload = dict(values.pop("workload", {}))
    try:
        NO_COSTS.replaced(values, "")
    except ValidationError as error:
        raise ConfigurationError(explain(error, "", Costs), where=str(file)) from error
    return values, workload


def _described(settings: TrainVLMSettings, values: Mapping[str, Any], file: Path | None) -> Workload:
    """Episodes as the file says; what it leaves out is assumed from the recipe."""
    environment, sampling = settings.environment, settings.rollouts.sampling
    kind = ENVIRONMENTS[environment.name]
    most = environment.args.get("max_turns") or getattr(kind, "max_turns", None) or 1
    prompt = min(512, max(16, settings.inference.max_model_len - sampling.max_tokens))
    assumed: dict[str, Any] = {
        "turns": 1.0 if most == 1 else most / 2,
        "max_turns": most,
        "dialogue": bool(getattr(kind, "dialogue", True)),
        "prompt_tokens": prompt,
        "completion_tokens": sampling.max_tokens / 2,
    }
    try:
        made = WorkloadSettings.model_validate(assumed | dict(values))
    except ValidationError as error:
        raise ConfigurationError(explain(error, "workload", WorkloadSettings), where=str(file)) from error
    said = made.model_dump()
    parts = [f"{key} = {said[key]:g}" if not isinstance(said[key], bool) else f"{key} = {said[key]}" for key in said]
    given = f"given in {file}: {', '.join(values)}; the rest " if values else ""
    return drawn(made, sampling.max_tokens, settings.rollouts.seed, f"{given}assumed: {', '.join(parts)}")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [
            cell.ljust(width) if index == len(row) - 1 else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
