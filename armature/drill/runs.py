"""Short runs of a recipe's learning stage, and what they computed, step by step."""

from __future__ import annotations

import hashlib
import json
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from armature.components.configuration import Recipe, load_recipe, recipe_path
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.contracts.digests import file_digest
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.stages import Artifact
from armature.components.machine.process import Program
from armature.components.rl.recipe import TrainVlm
from armature.drill.faults import MARK

SHORT = {
    "train-vlm": "trainer.max_steps=10 trainer.save_every=3 evaluation.every=4 evaluation.heldout_tasks=8 "
    "rollouts.groups_per_step=4 rollouts.group_size=4 batches.skip_zero_advantage=false preflight.groups=1 "
    "inference.deterministic=true machine.servers.endpoints=[]",
    "train-vlm/colors": "rollouts.max_staleness=1 model.tiny.format.steps=20",
    "train-vla-rl": "trainer.max_steps=3 rollouts.groups_per_step=2 rollouts.group_size=4",
    "train-vla-rl/tiny": "demonstrations.episodes_per_task=4 training.max_steps=100 training.warmup_steps=0 "
    "training.save_every=100 simulator.reach_distance=0.17 rollouts.max_steps=10 rollouts.reward.name=progress "
    "trainer.samples_per_update=1",
}
"""Overrides that cut a flow short, and more for some recipes."""
OWN = ("machine.remote_store=", "machine.report_to=[]")
"""Overrides that keep a run's files in its own folder."""
METRICS = ("reward", "loss", "grad_norm", "entropy", "importance_ratio", "kl", "updates")
"""Metrics of a step that are compared; most others are times."""
ORDER = ("rollouts", "robot-rollouts", "batches", "robot-batches", "history")
"""Kinds of results of a step, in the order in which a step makes them. All other kinds follow."""

Results = dict[tuple[int, int, str], str]
"""Digests and values of a run by step, position in `ORDER`, and name."""


def short_overrides(name: str) -> tuple[str, ...]:
    """Return the overrides that cut a recipe short.

    Raises:
        ConfigurationError: the recipe's flow has no runs that are compared bit for bit.
    """
    recipe = load_recipe(name)
    if recipe.flow not in SHORT:
        raise ConfigurationError(
            f"runs of the flow {recipe.flow!r} cannot be drilled",
            code="flow_not_drilled",
            where=name,
            remedy="choose a recipe of train-vlm or train-vla-rl",
        )
    return (*SHORT[recipe.flow].split(), *SHORT.get(recipe.name, "").split(), *OWN)


def make_inputs(recipe: Recipe) -> dict[str, Path]:
    """Run the stages before the learning stage, and return the folders of its inputs by name."""

    def run(stage: str, of: TrainVlm | None = None, /, **inputs: Artifact) -> Artifact:
        settings = (of or recipe.values).settings_for(STAGES[stage].settings)
        return run_stage(stage, settings, inputs, recipe.machine)

    if isinstance(recipe.values, TrainVlm):
        made = {"tasks": run("tasks"), "model": run("model")}
        if recipe.values.warm_start is not None:
            made["model"] = run("warm-start", **made)
        made |= recipe.values.made_teachers(run)
    else:
        made = {"policy": run("policy")}
        if "training" in recipe.sections:
            data = run("demonstrations")
            made = {"policy": run("train-vla", **made, dataset=data, statistics=run("quantile-stats", dataset=data))}
    return {name: each.path for name, each in made.items()}


@dataclass(frozen=True)
class DrilledRun:
    """One run of a recipe's learning stage, with a store of its own. Each call of `start` runs the same command again.

    Attributes:
        recipe: name or file of the recipe.
        overrides: changes of its values, as `--set` takes them.
        mark: the value of the environment variable `MARK` in all processes of the run.
    """

    folder: Path
    recipe: str
    overrides: tuple[str, ...]
    inputs: Mapping[str, Path]
    mark: str = field(default_factory=lambda: secrets.token_hex(16))

    @property
    def store(self) -> Path:
        return self.folder / "store"

    @property
    def log(self) -> Path:
        return self.folder / "run.log"

    @contextmanager
    def running(self) -> Iterator[Program]:
        """Start the run, and end all its processes with the block."""
        program = self.start()
        try:
            yield program
        finally:
            program.stop()

    def start(self) -> Program:
        """Start the run. Its processes end when this process ends, and those on Ray nodes when the run ends."""
        stage = load_recipe(self.recipe, self.overrides).flow
        command = [sys.executable, "-m", "armature", "stage", stage, "--config", str(recipe_path(self.recipe))]
        for override in (*self.overrides, f'machine.store="{self.store}"'):
            command += ["--set", override]
        for name, path in self.inputs.items():
            command += ["--input", f"{name}={path}"]
        # Ray gives these variables to the actors of the run, and to nothing else on its nodes.
        job = {"runtime_env": {"env_vars": {MARK: self.mark}}, "metadata": {}}
        environment = {MARK: self.mark, "RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps(job)}
        return Program([*command, "--out", str(self.folder / "made")], log=self.log, env=environment)

    def steps_done(self) -> int:
        histories = list((self.store / "workspaces").glob("train-*/history.jsonl"))
        lines = histories[0].read_text(errors="replace").splitlines() if histories else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def results(self) -> Results:
        """Return what the finished run computed.

        These are the columns of each step's rollouts, batch and evaluation without measured times, its metrics, and
        after the last step all files of the weights.
        """
        results: Results = {}
        rows = json.loads((self.folder / "made/history.json").read_text())
        for row in rows:
            results |= _at(row["step"], "history", ((name, repr(row[name])) for name in METRICS if name in row))
        for file in self.store.glob(f"*/*-{'[0-9]' * 5}/*.parquet"):
            if file.stem != "failures":
                results |= _at(int(file.parent.name[-5:]), file.parents[1].name, _columns(file))
        last = max(row["step"] for row in rows)
        folders = {"weights": next(self.store.glob(f"workspaces/*/weights/{last:06d}"), None)}
        for kind, folder in {**folders, "checkpoint": self.folder / "made/checkpoint"}.items():
            if folder is not None:
                files = sorted(path for path in folder.rglob("*") if path.is_file())
                results |= _at(last + 1, kind, ((str(path.relative_to(folder)), file_digest(path)) for path in files))
        return results


def first_difference(results: Results, undisturbed: Results) -> str:
    """Describe the first result in which a run differs from an undisturbed one. Return "" if they are equal.

    Example:
        >>> first_difference({(3, 4, "history: loss"): "0.25"}, {(3, 4, "history: loss"): "0.5"})
        'step 3, history: loss: 0.25, undisturbed 0.5'
    """
    for key in sorted(results.keys() | undisturbed.keys()):
        here, there = results.get(key, "missing"), undisturbed.get(key, "missing")
        if here != there:
            return f"step {key[0]}, {key[2]}: {here}, undisturbed {there}"
    return ""


def _at(step: int, kind: str, values: Iterator[tuple[str, str]]) -> Results:
    place = ORDER.index(kind) if kind in ORDER else len(ORDER)
    return {(step, place, f"{kind}: {name}"): value for name, value in values}


def _columns(file: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the digest of each column of a table, without columns of measured times.

    The table's name precedes the column's unless the folder is named after it: an evaluation has two tables.
    """
    table, kind = pq.read_table(file), file.parents[1].name
    for name in table.column_names:
        if not name.endswith("_seconds"):
            digest = hashlib.sha256(repr(table.column(name).to_pylist()).encode()).hexdigest()
            yield name if file.stem in kind else f"{file.stem} {name}", digest[:16]
