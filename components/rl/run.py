"""An RL run of a language model: rollouts from a pool of servers, and steps on a trainer service."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from anyio.from_thread import BlockingPortal

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.batches import Sample
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.metrics import merged
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.contracts.stages import Artifact, StageContext, report_waiting
from armature.components.environments.mixture import EnvironmentMixture
from armature.components.inference.client import Completion
from armature.components.inference.pool import ServerPool
from armature.components.inference.replies import Endpoint
from armature.components.rl.agreement import (
    LogprobAgreement,
    RecordingGenerator,
    compare,
    refuse_mismatch,
    refuse_other_texts,
    refuse_replay,
    step_mismatch,
)
from armature.components.rl.base import TrainingRun
from armature.components.rl.evaluations import HeldoutEvaluations, HeldoutSet
from armature.components.rl.loop import LoopPlan
from armature.components.rl.metrics import no_signal, rollout_metrics
from armature.components.rl.reporting import ShownStep
from armature.components.rl.settings import LoopSettings, teacher_input
from armature.components.rl.teacher import mixed
from armature.components.rollouts.batches.ratios import ratios_file
from armature.components.rollouts.batches.table import (
    BuiltBatch,
    SampleSource,
    Vocabulary,
    build_batch,
    read_batch,
    sample_defect,
    write_batch,
)
from armature.components.rollouts.collect import collect
from armature.components.rollouts.play import Generator
from armature.components.rollouts.sampler import (
    PlayedGroup,
    SignalSampler,
    choose_groups,
    play_rounds,
    played_groups,
    tasks_of_step,
)
from armature.components.rollouts.shards import RolloutWorkers
from armature.components.rollouts.table import read_rollouts, write_rollouts
from armature.components.vlm.client import OUT_OF_MEMORY, RECOMPUTES, TrainerClient


@dataclass(frozen=True)
class RunParts:
    """The parts from which a run is made: environment, tasks, servers, trainer and what is between them."""

    environment: Environment
    tasks: Sequence[Task]
    """Training tasks. The tasks of each step are chosen from them."""
    adapter: SampleSource
    """Turns rollouts into training samples."""
    tokenizer: Any
    """The policy's tokenizer, which is a fast tokenizer of transformers."""
    vocabulary: Vocabulary
    servers: ServerPool
    trainer: TrainerClient
    digests: Mapping[str, str]
    """Digests, by name, of the artifacts that are played. The manifests of rollouts list them."""
    sync_every: int = 1
    """Steps between new weights for the servers; 0: never."""
    rewarded: Callable[[GenerateOutputs], GenerateOutputs] = lambda outputs: outputs
    """A function that may change rollouts, such as their rewards, before they are written."""
    teachers: Mapping[str, str] = field(default_factory=dict)
    """The kind of the teacher that scores the samples of each task, by task id; empty without a teacher."""
    heldout: HeldoutSet | None = None
    """Tasks that are played between steps. Servers need the weights of every such step, so `sync_every` must be 1."""
    workers: RolloutWorkers | None = None
    """Processes that play the rollouts of steps; None plays them in this process."""
    adapters: bool = False
    """True if servers get only the adapters of a new version. The server pool must be set up for it."""


class RLRun(TrainingRun):
    """A run whose rollouts are sampled by a pool of model servers; see `TrainingRun`."""

    ROLLOUTS, BATCHES, STAGE = "rollouts", "batches", "train-vlm"
    SCORES = "teacher-scores"
    trainer: TrainerClient

    def __init__(
        self,
        settings: LoopSettings,
        context: StageContext,
        store: ArtifactStore,
        parts: RunParts,
        portal: BlockingPortal,
    ) -> None:
        self.settings, self.parts, self.pool, self.portal = settings, parts, parts.servers, portal
        plan, last, evaluations = settings.rollouts, settings.trainer.max_steps, None
        if parts.heldout is not None:
            evaluations = HeldoutEvaluations(parts.heldout, parts.servers, portal, context, store, last)
        loop = LoopPlan(last, settings.trainer.save_every, plan.max_staleness, plan.in_flight_updates, parts.sync_every)
        super().__init__(loop, context, store, parts.trainer, evaluations)
        self.images = ImageStore(context.images)
        self._sampler = SignalSampler(parts.tasks, plan)
        self._rollout_metrics: dict[int, dict[str, float]] = {}
        self._room = asyncio.Semaphore(context.machine.limits.max_concurrent)
        self._trained = False

    @property
    def version(self) -> int:
        """The version of the weights that the servers hold."""
        return self.pool.weights.version

    def _play(self, step: int) -> Artifact:
        chosen = self._chosen(step)
        outputs = self.portal.call(play_rounds, partial(self._round, self.pool, step, chosen), self.settings.rollouts)
        rows = {"trajectories": len(outputs.trajectories), "failures": len(outputs.failures)}
        fill = partial(write_rollouts, outputs=outputs)
        made = self._write(self.ROLLOUTS, step, fill, rows=rows, drops=outputs.drops, inputs=self.parts.digests)
        if self.parts.workers is not None:
            self.parts.workers.forget(step)
        return made

    def wait_for_rollouts(self, step: int) -> None:
        """Tell the rollout workers that training waits for the rollouts of `step`, so that late workers are
        replaced."""
        if self.parts.workers is not None:
            self.parts.workers.training_waits(step)

    def _build(self, step: int, rollouts: Artifact) -> tuple[BuiltBatch[Sample], dict[str, str]]:
        outputs = read_rollouts(rollouts.path)
        self._rollout_metrics[step] = self._metrics_of(outputs)
        if step in self.skipped:
            self.context.events.message(f"the batch of step {step} is skipped, as machine.skip_batches says")
            return BuiltBatch([], Counter(batch_skipped=len(outputs.trajectories)), {"batch/skipped": 1.0}), {}
        chosen = choose_groups(outputs, self.settings.rollouts)
        built = build_batch(chosen.outputs, self.parts.adapter, self.settings.batches, self.parts.vocabulary)
        metrics, inputs = merged(batch=built.metrics, rounds=chosen.metrics), {}
        if self.settings.teacher is not None and built.samples:
            scores = self._taught(step, built, outputs, rollouts.digest)
            inputs = {"teacher-scores": scores.digest}
            taught, teacher_metrics = mixed(read_batch(scores.path), self.settings.teacher)
            valid = [sample for sample in taught if sample_defect(sample, self.parts.vocabulary) is None]
            drops = built.drops + Counter(teacher_failed=len(taught) - len(valid))
            built, metrics = replace(built, samples=valid, drops=drops), metrics | teacher_metrics
        return BuiltBatch(built.samples, built.drops + Counter(chosen.drops), metrics), inputs

    def _taught(self, step: int, built: BuiltBatch[Sample], outputs: GenerateOutputs, digest: str) -> Artifact:
        """Return the samples of a batch with the scores of their teachers, from the store or from the trainer.

        The artifact is made before the batch, so a run that is killed between the two does not score again. `digest` is
        of the rollouts.
        """
        if made := self.store.find(self.SCORES, self._key(step)):
            return made
        tasks = {each.trajectory_id: each.task_id for each in outputs.trajectories}
        rows: dict[str, list[int]] = {}
        for row, sample in enumerate(built.samples):
            rows.setdefault(self.parts.teachers[tasks[sample.trajectory_id]], []).append(row)
        folder, taught = self.context.workspace / "teacher", list(built.samples)
        for kind, chosen in rows.items():
            shutil.rmtree(folder, ignore_errors=True)
            asked = replace(built, samples=[built.samples[row] for row in chosen]).write(folder / "samples")
            self._of_trainer(step - 1, partial(self.trainer.teach, asked, folder, kind))
            for row, sample in zip(chosen, read_batch(folder), strict=True):
                taught[row] = sample
        counts, inputs = {teacher_input(kind): len(chosen) for kind, chosen in rows.items()}, {"rollouts": digest}
        made = self._write(
            self.SCORES, step, partial(write_batch, samples=taught), rows=counts, drops={}, inputs=inputs
        )
        shutil.rmtree(folder)
        return made

    def _write_samples(self, folder: Path, samples: Sequence[Sample]) -> None:
        write_batch(folder, samples)

    def _apply(self, step: int, batch: Artifact) -> dict[str, float]:
        first, self._trained = not self._trained, True
        with self._compiling("the first gradients") if first else nullcontext():
            metrics = self.trainer.step(step, batch.path, ratios_file(self.context.workspace, step))
        if OUT_OF_MEMORY in metrics:
            self.context.events.message(f"step {step}: {RECOMPUTES}")
        bounds = self.settings.preflight
        if (error := step_mismatch(metrics, step, bounds.max_step_mismatch_kl)) is not None:
            if bounds.step_mismatch == "stop":
                raise error
            self.context.events.message(f"warning: {error}")
        return metrics

    def _give(self, version: int) -> None:
        folder = self.weights / f"{version:06d}"
        answer = self._of_trainer(version, lambda: self.trainer.probe(self.pool.weights.probe, version))
        if self.context.machine.sends_folders:
            self._of_trainer(version, lambda: self._publish_version(folder, version))
            self.portal.call(self.pool.sync, folder, version, None, answer)
            return

        async def send(endpoints: Sequence[Endpoint]) -> None:
            await asyncio.to_thread(self.trainer.send, endpoints, version)

        self.portal.call(self.pool.sync, folder, version, send, answer)

    def _publish_version(self, folder: Path, version: int) -> None:
        if self.parts.adapters:
            self.trainer.publish_version(folder, version, "adapter")
        elif self.context.machine.servers.weight_transfer == "delta":
            self.trainer.publish_version(folder, version, "delta")
        else:
            self.trainer.publish(folder, version)

    def _numbers(self, step: int) -> dict[str, float]:
        if (metrics := self._rollout_metrics.pop(step, None)) is None:  # an earlier attempt built the batch
            metrics = self._metrics_of(read_rollouts(self._made(self.ROLLOUTS, step).path))
        return metrics | {"machine/servers": float(len(self.pool.replicas))}

    def _refuse_disagreement(self) -> None:
        self.context.events.message("\n".join(["pre-flight: trainer and server agree", *self.preflight().lines()]))

    def preflight(self) -> LogprobAgreement:
        """Compare the log-probs of trainer and servers on a few rollouts, and warn if nothing can be learned from them.

        Raises:
            MismatchError: trainer and servers disagree, none of the rollouts becomes a sample, or replaying experts
                does not make them agree better.
        """
        outputs, completions = self.play_tasks(self.preflight_tasks())
        refuse_other_texts(completions, self.parts.tokenizer.backend_tokenizer)
        samples, drops = self.parts.adapter.samples(outputs)
        drops.update(outputs.drops)
        agreement = self._agreement(samples)
        if any(sample.experts is not None for sample in samples):
            without = self._agreement([replace(sample, experts=None) for sample in samples])
            refuse_replay(agreement, without)
            self.context.events.message(
                f"experts replayed: mismatch KL {agreement.mismatch_kl:.3g}, without {without.mismatch_kl:.3g}"
            )
        refuse_mismatch(agreement, drops, self.settings.preflight.max_mismatch_kl, outputs.failures)
        if self.settings.teacher is None and (warning := no_signal(outputs.trajectories, self.settings.batches)):
            self.context.events.message(warning)
        return agreement

    def _agreement(self, samples: Sequence[Sample]) -> LogprobAgreement:
        """Compare the trainer's log-probs of the samples with the server's."""
        folder = self.context.workspace / "preflight"
        folder.mkdir(exist_ok=True)
        write_batch(folder, samples)
        if not samples:
            return compare(samples, [])
        with self._compiling("log-probs of the pre-flight"):
            return compare(samples, self._of_trainer(0, lambda: self.trainer.score(folder)))

    def _compiling(self, what: str) -> AbstractContextManager[None]:
        """Say what the trainer does within the block, which compiles layers if the trainer is to."""
        compiles = ", whose layers are compiled first" * self.settings.trainer.torch_compile
        return report_waiting(self.context.events, lambda: f"{what} by the trainer{compiles}")

    def _metrics_of(self, outputs: GenerateOutputs) -> dict[str, float]:
        environment = self.parts.environment
        return rollout_metrics(outputs, environment.parts if isinstance(environment, EnvironmentMixture) else ())

    def preflight_tasks(self) -> list[Task]:
        """Return the tasks of the pre-flight, one for each group."""
        return tasks_of_step(self.parts.tasks, self.settings.preflight.groups, 0, self.settings.rollouts.seed)

    def play_tasks(self, tasks: Sequence[Task]) -> tuple[GenerateOutputs, list[Completion]]:
        """Play a group of rollouts of each task in this process, without storing them.

        Returns:
            The rollouts, and the servers' completions.
        """
        recorded = RecordingGenerator(self.pool)
        return self.portal.call(self._round, recorded, 0, [tasks], 0), recorded.completions

    def shown(self, step: int) -> ShownStep:
        """Return the files of a finished step that the report page shows."""
        rollouts, batch = (self._made(kind, step).path for kind in (self.ROLLOUTS, self.BATCHES))
        return ShownStep(step, rollouts, batch, ratios_file(self.context.workspace, step))

    def groups(self, last: int) -> Iterator[PlayedGroup]:
        """Yield the groups of rollouts of steps 1 to `last`."""
        for step in range(1, last + 1):
            yield from self._groups(step)

    def _groups(self, step: int) -> list[PlayedGroup]:
        return played_groups(step, self._made(self.ROLLOUTS, step).path)

    def _chosen(self, step: int) -> list[list[Task]]:
        """Return the tasks of `step` as one list for each round of rollouts."""
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
