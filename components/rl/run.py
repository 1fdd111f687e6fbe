"""One RL run: the units of its steps, on a server pool and a trainer service that it holds open."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal

from armature.components.artifacts.disk import link_folder
from armature.components.artifacts.history import History
from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.batches.build import BuiltBatch, SampleSource, build_batch
from armature.components.batches.check import Vocabulary
from armature.components.batches.ratios import ratios_file
from armature.components.batches.table import write_batch
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import TrainerError
from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.pool import ServerPool
from armature.components.rl.agreement import LogprobAgreement, compare, refuse_mismatch, step_mismatch
from armature.components.rl.cpu import CpuTimes
from armature.components.rl.loop import Ahead, run_loop
from armature.components.rl.metrics import rollout_metrics
from armature.components.rl.panel import HeldoutPanel, PanelEvaluations
from armature.components.rl.reporting import ShownStep
from armature.components.rl.settings import LoopSettings
from armature.components.rl.signal import no_signal
from armature.components.rl.texts import RecordingGenerator, refuse_other_texts
from armature.components.rollouts.collect import collect
from armature.components.rollouts.difficulty import PlayedGroup, played_groups
from armature.components.rollouts.generator import Generator
from armature.components.rollouts.rounds import choose_groups, play_rounds
from armature.components.rollouts.sampler import SignalSampler
from armature.components.rollouts.schedule import tasks_of_step
from armature.components.rollouts.shards import RolloutWorkers
from armature.components.rollouts.table import read_rollouts, write_rollouts
from armature.components.training.client import with_restarts
from armature.components.vlm.client import TrainerClient

BATCH_METRICS = "metrics.json"
EVALUATION = "evaluation"
T = TypeVar("T")


@dataclass(frozen=True)
class RunParts:
    """What a run joins.

    `tokenizer` is that of the policy, a fast one of transformers; `digests` are those of what is played, by name, for
    the manifests of rollouts; the servers get new weights after every `sync_every` steps, 0: never; `rewarded` may
    change what is played before it is kept; `panel` is played between steps, for which servers need the weights of
    each: `sync_every` is 1 then; `workers` collect the rollouts of steps in place of this process; with `adapters` the
    servers get these alone, as the pool was told.
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
    panel: HeldoutPanel | None = None
    workers: RolloutWorkers | None = None
    adapters: bool = False


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
        self.skipped: frozenset[int] = frozenset()
        self.evaluations = (
            PanelEvaluations(parts.panel, context, store, settings.trainer.max_steps)
            if parts.panel is not None
            else None
        )
        self._sampler = SignalSampler(parts.tasks, settings.rollouts)
        self._room = asyncio.Semaphore(context.machine.max_concurrent)
        self._step_metrics: dict[int, dict[str, float]] = {}
        self._cpu = CpuTimes()

    def train_from(self, done: int) -> int:
        """All steps after `done`; before the first one trainer and servers have to agree.

        Returns the last step: less than `max_steps` where the evaluations ended the training.

        Raises:
            DataError: the weights of the best evaluation are gone.
            MismatchError: they do not.
        """
        units, events = self.context.units, self.context.events
        if self.evaluates(done):  # before the pre-flight, which then leaves the servers as it does without a panel
            ends = units.submit(f"evaluation-{done:05d}", self.evaluate, done).result()
            assert self.evaluations is not None
            events.metrics(self.evaluations.complete(self.history, done), done)
            if ends:
                return done
        if self.evaluations is not None:
            self.evaluations.refuse_lost_weights(done)
        if done == 0:
            events.message("\n".join(["pre-flight: trainer and server agree", *self.preflight().lines()]))
        last, plan = self.settings.trainer.max_steps, self.settings.rollouts
        ahead = Ahead(plan.max_staleness, plan.in_flight_updates)
        return run_loop(self, done + 1, last, ahead, units, events, self.parts.sync_every)

    def rollouts(self, step: int) -> Artifact:
        """The rollouts of `step`, found or collected."""
        if made := self.store.find("rollouts", self._key(step)):
            return made
        plan = self.settings.rollouts
        chosen = self._chosen(step)
        outputs = self.portal.call(play_rounds, partial(self._round, self.pool, step, chosen), plan)

        def fill(folder: Path) -> None:
            write_rollouts(folder, outputs)
            rows = {"trajectories": len(outputs.trajectories), "failures": len(outputs.failures)}
            self._describe(folder, "rollouts", step, rows, outputs.drops, dict(self.parts.digests))

        artifact = self.store.write("rollouts", self._key(step), fill)
        if self.parts.workers is not None:
            self.parts.workers.forget(step)
        self.context.events.artifact(artifact, "output", step)
        return artifact

    def awaits(self, step: int) -> None:
        """Training waits for the rollouts of `step`: workers that are late with them are replaced."""
        if self.parts.workers is not None:
            self.parts.workers.awaited(step)

    def batch(self, step: int, rollouts: Artifact) -> Artifact:
        """The training samples of `step` with their advantages."""
        outputs = read_rollouts(rollouts.path)
        if (made := self.store.find("batches", self._batch_key(step))) is None:
            built = self._built(step, outputs)
            metrics = merged(batch=built.metrics, drops=metrics_below("drops", built.drops))

            def fill(folder: Path) -> None:
                write_batch(folder, built.samples)
                (folder / BATCH_METRICS).write_text(json.dumps(metrics, indent=1, sort_keys=True) + "\n")
                rows = {"samples": len(built.samples)}
                self._describe(folder, "batches", step, rows, dict(built.drops), {"rollouts": rollouts.digest})

            made = self.store.write("batches", self._batch_key(step), fill)
            self.context.events.artifact(made, "output", step)
        batch = json.loads((made.path / BATCH_METRICS).read_text())
        self._step_metrics[step] = merged(rollouts=rollout_metrics(outputs), batch=batch)
        return made

    def _built(self, step: int, outputs: GenerateOutputs) -> BuiltBatch:
        if step in self.skipped:
            self.context.events.message(f"the batch of step {step} is skipped, as machine.skip_batches says")
            return BuiltBatch([], Counter(batch_skipped=len(outputs.trajectories)), {"batch/skipped": 1.0})
        chosen = choose_groups(outputs, self.settings.rollouts)
        built = build_batch(chosen.outputs, self.parts.adapter, self.settings.batches, self.parts.vocabulary)
        metrics = merged(batch=built.metrics, rounds=chosen.metrics)
        return BuiltBatch(built.samples, built.drops + Counter(chosen.drops), metrics)

    def train(self, step: int, batch: Artifact) -> dict[str, float]:
        """Apply `step`."""
        return self._of_trainer(step - 1, lambda: self._apply(step, batch))

    def _of_trainer(self, done: int, ask: Callable[[], T]) -> T:
        """The answer of a trainer that has the weights after step `done`, which it replays if it dies."""

        def replay(step: int) -> None:
            self._apply(step, self._made_batch(step))

        return with_restarts(self.trainer, done, ask, replay, self.context.events)

    def _apply(self, step: int, batch: Artifact) -> dict[str, float]:
        metrics = self.trainer.step(step, batch.path, ratios_file(self.context.workspace, step))
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
        if not all(self.store.find("rollouts", self._key(step)) for step in upcoming):
            self._give(version)

    def _give(self, version: int) -> None:
        folder = self.weights / f"{version:06d}"
        answer = self._of_trainer(version, lambda: self.trainer.probe(self.pool.weights.probe, version))
        if self.context.machine.sends_folders:
            self._of_trainer(version, lambda: self._publish(folder, version))
            self.portal.call(self.pool.sync, folder, version, None, answer)
            return

        async def send(endpoints: Sequence[Endpoint]) -> None:
            await asyncio.to_thread(self.trainer.send, endpoints, version)

        self.portal.call(self.pool.sync, folder, version, send, answer)

    def _publish(self, folder: Path, version: int) -> None:
        if self.parts.adapters:
            self.trainer.publish_version(folder, version, "adapter")
        elif self.context.machine.weight_transfer == "delta":
            self.trainer.publish_version(folder, version, "delta")
        else:
            self.trainer.publish(folder, version)

    def evaluates(self, step: int) -> bool:
        """Whether the panel is played by the weights after `step`."""
        return self.evaluations is not None and self.evaluations.due(step)

    def evaluate(self, step: int) -> bool:
        """Play the panel by the weights after `step`, unless that was done; keep the weights if they are the best.

        Returns whether training ends here.
        """
        evaluations = self.evaluations
        assert evaluations is not None
        if step not in evaluations.made:
            if self.pool.weights.version != step:
                self._give(step)
            evaluations.keep(step, self.portal.call(evaluations.play, self.pool))
        evaluations.keep_best(step, lambda folder: self._of_trainer(step, lambda: self.trainer.publish(folder, step)))
        ends = evaluations.out_of_patience(step)
        self.context.events.message(evaluations.said(step) + "; training ends here" * ends)
        return ends

    def record(self, step: int, metrics: dict[str, float]) -> dict[str, float]:
        machine = self.context.machine
        whole = merged(
            trainer=metrics,
            rollouts=self._step_metrics.pop(step, {}),
            evaluation=self.evaluations.history(step) if self.evaluations is not None else {},
            cpu=self._cpu.since() if "timing/step" in metrics else {},
            machine={
                "machine/servers": float(len(self.pool.replicas)),
                "machine/ranks": float(machine.trainer_nodes * machine.trainer_processes),
            },
        )
        self.history.append(step, whole)
        return whole

    def complete_history(self, done: int) -> None:
        """Record the applied steps that a crash kept out of the history; the trainer still knows their metrics."""
        recorded = {row["step"] for row in self.history.read()}
        for step in sorted(set(range(1, done + 1)) - recorded):
            batch = self.batch(step, self.rollouts(step))
            self.record(step, self._of_trainer(done, partial(self.trainer.step, step, batch.path)))

    def preflight(self) -> LogprobAgreement:
        """Says so where nothing could be learned from its rollouts.

        Raises:
            MismatchError: trainer and server disagree, or no rollout becomes a sample.
        """
        overheard = RecordingGenerator(self.pool)
        plan = self.settings.rollouts
        tasks = tasks_of_step(self.parts.tasks, self.settings.preflight.groups, 0, plan.seed)
        outputs = self.portal.call(self._round, overheard, 0, [tasks], 0)
        refuse_other_texts(overheard.completions, self.parts.tokenizer.backend_tokenizer)
        samples, drops = self.parts.adapter.samples(outputs)
        drops.update(outputs.drops)
        folder = self.context.workspace / "preflight"
        folder.mkdir(exist_ok=True)
        write_batch(folder, samples)
        scores = self._of_trainer(0, lambda: self.trainer.score(folder)) if samples else []
        agreement = compare(samples, scores)
        refuse_mismatch(agreement, drops, self.settings.preflight.max_mismatch_kl)
        if warning := no_signal(outputs.trajectories, self.settings.batches):
            self.context.events.message(warning)
        return agreement

    def finish(self, folder: Path, last: int) -> None:
        """Write the weights in the Hugging Face layout: those of the best evaluation, else those after step `last`."""
        if self.evaluations is None:
            self._of_trainer(last, lambda: self.trainer.publish(folder, last))
        else:
            self.evaluations.refuse_lost_weights(last)
            link_folder(self.evaluations.best_weights, folder)
        self.trainer.finish()

    def shown(self, step: int) -> ShownStep:
        """A step that was made, for the pages of the run."""
        rollouts = self.store.find("rollouts", self._key(step))
        assert rollouts is not None
        return ShownStep(step, rollouts.path, self._made_batch(step).path, ratios_file(self.context.workspace, step))

    def groups(self, last: int) -> Iterator[PlayedGroup]:
        """The groups of steps 1 to `last`."""
        for step in range(1, last + 1):
            yield from self._groups(step)

    def _groups(self, step: int) -> list[PlayedGroup]:
        rollouts = self.store.find("rollouts", self._key(step))
        assert rollouts is not None
        return played_groups(step, rollouts.path)

    def lineage(self, last: int) -> list[dict[str, Any]]:
        """The digests of the rollouts and the batch of every step, and of a batch that was made and then skipped;
        those of evaluations, of which the first is of step 0."""
        steps: list[dict[str, Any]] = []
        played = self.evaluations.made if self.evaluations is not None else {}
        if 0 in played:
            steps.append({"step": 0, EVALUATION: played[0].digest})
        for step in range(1, last + 1):
            rollouts, batch = self.store.find("rollouts", self._key(step)), self._made_batch(step)
            assert rollouts is not None
            row = {"step": step, "rollouts": rollouts.digest, "batch": batch.digest}
            if step in self.skipped and (poisoned := self.store.find("batches", self._key(step))):
                row["skipped"] = poisoned.digest
            if step in played:
                row[EVALUATION] = played[step].digest
            steps.append(row)
        return steps

    def _chosen(self, step: int) -> list[list[Task]]:
        """The tasks of each round of `step`."""
        plan = self.settings.rollouts
        if plan.repeat_no_signal < 1:
            return self._sampler.tasks_of_step(step, self._groups)
        rounds = range(plan.max_rounds)
        return [tasks_of_step(self.parts.tasks, plan.groups_per_step, step, plan.seed, number) for number in rounds]

    async def _round(
        self, policy: Generator, step: int, chosen: Sequence[Sequence[Task]], number: int
    ) -> GenerateOutputs:
        plan, events, first_group = self.settings.rollouts, self.context.events, number * len(chosen[number])
        name = f"rollouts {step}" if plan.in_flight_updates else "rollouts"
        if self.parts.workers is not None and policy is self.pool:
            played = self.parts.workers.collect(chosen[number], events, step=step, first_group=first_group, name=name)
            return self.parts.rewarded(await played)
        outputs = await collect(
            self.parts.environment,
            chosen[number],
            plan.group_size,
            policy,
            self.images,
            plan.sampling,
            step=step,
            seed=plan.seed,
            machine=self.context.machine,
            events=events,
            first_group=first_group,
            name=name,
            room=self._room,
        )
        return self.parts.rewarded(outputs)

    def _made_batch(self, step: int) -> Artifact:
        made = self.store.find("batches", self._batch_key(step))
        if made is None:
            raise TrainerError(
                f"batch {step} is gone, so the trainer cannot be brought back to where it was",
                code="batch_missing",
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
