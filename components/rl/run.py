"""One RL run: the units of its steps, on a server pool and a trainer service that it holds open."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal

from components.artifacts.history import History
from components.artifacts.images import ImageStore
from components.artifacts.manifest import write_manifest
from components.artifacts.store import ArtifactStore
from components.batches.build import BuiltBatch, SampleSource, build_batch
from components.batches.check import Vocabulary
from components.batches.table import write_batch
from components.contracts.episodes import Environment, Task
from components.contracts.errors import TrainerError
from components.contracts.rollouts import GenerateOutputs
from components.contracts.stages import Artifact, StageContext
from components.inference.endpoint import Endpoint
from components.inference.pool import ServerPool
from components.rl.agreement import LogprobAgreement, compare, refuse_mismatch, step_mismatch
from components.rl.loop import run_loop
from components.rl.metrics import rollout_metrics
from components.rl.reporting import ViewerSteps
from components.rl.settings import LoopSettings
from components.rl.texts import RecordingGenerator, refuse_other_texts
from components.rollouts.collect import collect
from components.rollouts.generator import Generator
from components.rollouts.rounds import choose_groups, play_rounds
from components.rollouts.schedule import tasks_of_step
from components.rollouts.table import read_rollouts, write_rollouts
from components.training.client import TrainerClient
from components.training.restarts import with_restarts

BATCH_METRICS = "metrics.json"
T = TypeVar("T")


@dataclass(frozen=True)
class RunParts:
    """What a run joins.

    `tokenizer` is that of the policy, a fast one of transformers; `digests` are those of what is played, by name, for
    the manifests of rollouts; the servers get new weights after every `sync_every` steps, 0: never; `rewarded` may
    change what is played before it is kept; `viewed`: whether the first and the last step are kept for the viewer.
    """

    environment: Environment
    tasks: Sequence[Task]
    adapter: SampleSource
    tokenizer: Any
    vocabulary: Vocabulary
    servers: ServerPool
    trainer: TrainerClient
    digests: Mapping[str, str]
    sync_every: int = 1
    rewarded: Callable[[GenerateOutputs], GenerateOutputs] = lambda outputs: outputs
    viewed: bool = True


class RLRun:
    """Units that can be asked again: rollouts and batches are artifacts, and step k is applied once.

    The batch artifacts are the write-ahead log: a trainer that comes back from its last checkpoint is given the
    batches since then, and a run that is started again finds its rollouts and batches made.
    """

    def __init__(
        self,
        settings: LoopSettings,
        context: StageContext,
        store: ArtifactStore,
        parts: RunParts,
        portal: BlockingPortal,
    ) -> None:
        self.settings, self.context, self.store, self.parts = settings, context, store, parts
        self.pool, self.trainer, self.portal = parts.servers, parts.trainer, portal
        self.images = ImageStore(context.images)
        self.history = History(context.workspace / "history.jsonl")
        self.weights = context.workspace / "weights"
        self.gallery = ViewerSteps()
        self.skipped: frozenset[int] = frozenset()
        self._step_metrics: dict[int, dict[str, float]] = {}

    def train_from(self, done: int) -> None:
        """All steps after `done`; before the first one trainer and servers have to agree.

        Raises:
            MismatchError: they do not.
        """
        if done == 0:
            self.context.events.message("\n".join(["pre-flight: trainer and server agree", *self.preflight().lines()]))
        last, staleness = self.settings.trainer.max_steps, self.settings.rollouts.max_staleness
        run_loop(self, done + 1, last, staleness, self.context.units, self.context.events, self.parts.sync_every)

    def rollouts(self, step: int) -> Artifact:
        """The rollouts of `step`, found or collected."""
        if made := self.store.find("rollouts", self._key(step)):
            return made
        plan = self.settings.rollouts
        outputs = self.portal.call(play_rounds, partial(self._round, self.pool, step, plan.groups_per_step), plan)

        def fill(folder: Path) -> None:
            write_rollouts(folder, outputs)
            rows = {"trajectories": len(outputs.trajectories), "failures": len(outputs.failures)}
            self._describe(folder, "rollouts", step, rows, outputs.drops, dict(self.parts.digests))

        artifact = self.store.write("rollouts", self._key(step), fill)
        self.context.events.artifact(artifact, "output", step)
        return artifact

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """The training samples of `step` with their advantages."""
        outputs = read_rollouts(rollouts.path)
        if (made := self.store.find("batches", self._batch_key(step))) is None:
            built = self._built(step, outputs)
            metrics = built.metrics | {f"drops/{reason}": float(count) for reason, count in built.drops.items()}

            def fill(folder: Path) -> None:
                write_batch(folder, built.samples)
                (folder / BATCH_METRICS).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
                rows = {"samples": len(built.samples)}
                self._describe(folder, "batches", step, rows, dict(built.drops), {"rollouts": rollouts.digest})

            made = self.store.write("batches", self._batch_key(step), fill)
            self.context.events.artifact(made, "output", step)
        self._step_metrics[step] = rollout_metrics(outputs) | json.loads((made.path / BATCH_METRICS).read_text())
        return made

    def _built(self, step: int, outputs: GenerateOutputs) -> BuiltBatch:
        if step in self.skipped:
            self.context.events.message(f"the batch of step {step} is skipped, as machine.skip_batches says")
            return BuiltBatch([], Counter(batch_skipped=len(outputs.trajectories)), {"batch/skipped": 1.0})
        chosen = choose_groups(outputs, self.settings.rollouts)
        built = build_batch(chosen.outputs, self.parts.adapter, self.settings.batches, self.parts.vocabulary)
        return BuiltBatch(built.samples, built.drops + Counter(chosen.drops), built.metrics | chosen.metrics)

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        """Apply `step`."""
        return self._of_trainer(step - 1, lambda: self._apply(step, batch))

    def _of_trainer(self, done: int, ask: Callable[[], T]) -> T:
        """The answer of a trainer that has the weights after step `done`, which it replays if it dies."""

        def replay(step: int) -> None:
            self._apply(step, self._made_batch(step))

        return with_restarts(self.trainer, done, ask, replay, self.context.events)

    def _apply(self, step: int, batch: Artifact) -> dict[str, float]:
        if self.parts.viewed and step in (1, self.settings.trainer.max_steps):
            rollouts = self.store.find("rollouts", self._key(step))
            assert rollouts is not None
            self.gallery.add(rollouts, batch, self.trainer.score(batch.path))
        metrics = self.trainer.step(step, batch.path)
        bounds = self.settings.preflight
        if (error := step_mismatch(metrics, step, bounds.max_step_mismatch_kl)) is not None:
            if bounds.step_mismatch == "stop":
                raise error
            self.context.events.message(f"warning: {error}")
        return metrics

    def save(self, step: int) -> None:
        """Write a checkpoint, if one is due after `step`."""
        if step % self.settings.trainer.save_every == 0 or step == self.settings.trainer.max_steps:
            self._of_trainer(step, self.trainer.save)

    def sync(self, version: int) -> None:
        """Bring the weights after step `version` to every server, unless all that they would sample is made."""
        every = self.parts.sync_every or self.settings.trainer.max_steps
        upcoming = range(version + 1, version + 1 + every + self.settings.rollouts.max_staleness)
        if all(self.store.find("rollouts", self._key(step)) for step in upcoming):
            return
        folder = self.weights / f"{version:06d}"
        answer = self._of_trainer(version, lambda: self.trainer.probe(self.pool.weights.probe, version))
        if self.context.machine.weight_transfer == "file":
            self._of_trainer(version, lambda: self.trainer.publish(folder, version))
            self.portal.call(self.pool.sync, folder, version, None, answer)
            return

        async def send(endpoints: Sequence[Endpoint]) -> None:
            await asyncio.to_thread(self.trainer.send, endpoints, version)

        self.portal.call(self.pool.sync, folder, version, send, answer)

    def record(self, step: int, metrics: dict[str, float]) -> None:
        metrics.update(self._step_metrics.pop(step, {}))
        self.history.append(step, metrics)

    def complete_history(self, done: int) -> None:
        """Record the applied steps that a crash kept out of the history; the trainer still knows their metrics."""
        recorded = {row["step"] for row in self.history.read()}
        for step in sorted(set(range(1, done + 1)) - recorded):
            batch = self.batch(step, self.rollouts(step))
            self.record(step, self._of_trainer(done, partial(self.trainer.step, step, batch.path)))

    def preflight(self) -> LogprobAgreement:
        """
        Raises:
            MismatchError: trainer and server disagree, or no rollout becomes a sample.
        """
        overheard = RecordingGenerator(self.pool)
        outputs = self.portal.call(self._round, overheard, 0, self.settings.preflight.groups, 0)
        refuse_other_texts(overheard.completions, self.parts.tokenizer.backend_tokenizer)
        samples, drops = self.parts.adapter.samples(outputs)
        drops.update(outputs.drops)
        folder = self.context.workspace / "preflight"
        folder.mkdir(exist_ok=True)
        write_batch(folder, samples)
        scores = self._of_trainer(0, lambda: self.trainer.score(folder)) if samples else []
        agreement = compare(samples, scores)
        refuse_mismatch(agreement, drops, self.settings.preflight.max_mismatch_kl)
        return agreement

    def finish(self, folder: Path) -> None:
        """Write the final weights in the Hugging Face layout."""
        last = self.settings.trainer.max_steps
        self._of_trainer(last, lambda: self.trainer.publish(folder, last))
        self.trainer.finish()

    def lineage(self) -> list[dict[str, Any]]:
        """The digests of the rollouts and the batch of every step, and of a batch that was made and then skipped."""
        steps = []
        for step in range(1, self.settings.trainer.max_steps + 1):
            rollouts, batch = self.store.find("rollouts", self._key(step)), self._made_batch(step)
            assert rollouts is not None
            row = {"step": step, "rollouts": rollouts.digest, "batch": batch.digest}
            if step in self.skipped and (poisoned := self.store.find("batches", self._key(step))):
                row["skipped"] = poisoned.digest
            steps.append(row)
        return steps

    async def _round(self, policy: Generator, step: int, groups: int, number: int) -> GenerateOutputs:
        plan = self.settings.rollouts
        outputs = await collect(
            self.parts.environment,
            tasks_of_step(self.parts.tasks, groups, step, plan.seed, number),
            plan.group_size,
            policy,
            self.images,
            plan.sampling,
            step=step,
            seed=plan.seed,
            machine=self.context.machine,
            events=self.context.events,
            first_group=number * groups,
        )
        return self.parts.rewarded(outputs)

    def _made_batch(self, step: int) -> Artifact:
        made = self.store.find("batches", self._batch_key(step))
        if made is None:
            raise TrainerError(
                f"batch {step} is gone, so the trainer cannot be brought back to where it was",
                where=str(self.store.home("batches", self._batch_key(step))),
                remedy="start the run again: it collects the missing rollouts",
            )
        return made

    def _key(self, step: int) -> str:
        return f"{self.context.fingerprint}-{step:05d}"

    def _batch_key(self, step: int) -> str:
        return self._key(step) + "-skipped" * (step in self.skipped)

    def _describe(
        self, folder: Path, kind: str, step: int, rows: dict[str, int], drops: dict[str, int], inputs: dict[str, str]
    ) -> None:
        settings = {"run": self.context.fingerprint, "step": step}
        write_manifest(folder, kind=kind, kind_version=1, rows=rows, drops=drops, inputs=inputs, settings=settings)
