"""The stage train-vla-rl: it trains a robot policy by reinforcement learning in LIBERO."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from armature.components.contracts.metrics import counted_reasons, last_tenth, merged, write_json
from armature.components.contracts.stages import Artifact, Stage, StageContext, StageReport
from armature.components.robots.rl.settings import GAE, TrainVLARLSettings

if TYPE_CHECKING:
    from armature.components.robots.rl.table import ActionChunk

History = Sequence[Mapping[str, float]]


def train_vla_rl(
    settings: TrainVLARLSettings, inputs: Mapping[str, Artifact], out: Path, context: StageContext
) -> StageReport:
    """Train the policy and write `checkpoint/`, `history.json`, `lineage.json`, `metrics.json` and the report.

    The checkpoint has the released layout and needs no other file. With evaluations during training it has the weights
    of the best evaluation.

    Raises:
        ConfigurationError: policy, simulator and settings do not fit each other.
        DataError: the weights of the best evaluation are missing.
        MismatchError: trainer and sampler compute different probabilities for the same chunks.
        WorkerError: more episodes than allowed could not be played.
        TrainerError: the trainer process dies repeatedly.
    """
    from armature.components.artifacts.images import ImageStore
    from armature.components.configuration.stages import open_store
    from armature.components.rl.evaluations import BEST
    from armature.components.robots.evaluation.robot import libero_robot, refuse_cameras
    from armature.components.robots.evaluation.schedule import refuse_episodes
    from armature.components.robots.evaluation.stage import open_simulators
    from armature.components.robots.libero.tasks import suite_tasks
    from armature.components.robots.policies.player import open_flow_policy
    from armature.components.robots.rl.client import RobotRLTrainerClient, RobotRLTraining
    from armature.components.robots.rl.collect import Collector
    from armature.components.robots.rl.heldout import RobotEvaluations
    from armature.components.robots.rl.run import RobotRLRun
    from armature.components.robots.rl.schedule import refuse_groups
    from armature.components.robots.rl.table import read_rollouts

    plan, machine = settings.rollouts, context.machine
    refuse_groups(plan, settings.simulator)
    if settings.evaluation is not None:
        refuse_episodes(settings.evaluation, settings.simulator)
    policy = open_flow_policy(
        inputs["policy"].path,
        plan.inference_action_mode,
        rows=plan.rows_per_pass,
        torch_compile=plan.torch_compile,
        quantization=plan.quantization,
    )
    refuse_cameras(policy.cameras, libero_robot(settings.simulator))
    training = RobotRLTraining(
        trainer=settings.trainer,
        rollouts=plan,
        policy=inputs["policy"].path.resolve(),
        images=context.images,
        fingerprint=context.fingerprint,
    )

    saved = partial(context.saved, best=context.workspace / BEST)
    with ExitStack() as opened:
        processes = opened.enter_context(open_simulators(settings.simulator, machine, plan))
        gamma = advantage.gamma if isinstance(advantage := settings.trainer.advantage, GAE) else 1.0
        progress = partial(context.events.progress, "episodes")
        collector = Collector(plan, policy, processes, ImageStore(context.images), progress, gamma)
        trainer = opened.enter_context(RobotRLTrainerClient(training, machine, context.workspace / "trainer", saved))
        tasks, store = suite_tasks(plan.suite), open_store(machine)
        evaluations = None
        if (heldout := settings.evaluation) is not None:
            evaluated_tasks = {str(suite): suite_tasks(suite) for suite in heldout.suites}
            evaluated = policy.reconfigured(
                heldout.inference_action_mode,
                heldout.rows_per_pass,
                n_action_steps=heldout.n_action_steps,
                num_inference_steps=heldout.num_inference_steps,
                image_attention=heldout.image_attention_at_inference,
            )
            digests, last = {"policy": inputs["policy"].digest}, settings.trainer.max_steps
            evaluations = RobotEvaluations(
                heldout, evaluated_tasks, evaluated, collector.processes, digests, context, store, last
            )
        run = RobotRLRun(settings, context, store, policy, tasks, collector, trainer, inputs["policy"], evaluations)
        run.resume(done := trainer.resume())
        last, history, best = run.train_into(out, done)
        newest = read_rollouts(run.rollouts(last).path)
    steps = [row for row in history if row["step"] > 0]
    write_json(out / "metrics.json", merged(run=summary(steps), best=best))
    write_pages(out, settings, history, newest, best)
    episodes = int(sum(row.get("rollouts/planned", 0) for row in steps))
    return StageReport(
        rows={"steps": len(steps), "episodes": episodes},
        drops=counted_reasons(steps),
    )


def summary(history: History) -> dict[str, float]:
    """Return means of the main metrics over the last tenth of the steps."""
    keys = ("reward", "importance_ratio", "kl", "groups/zero_advantage_fraction", "answers/per_episode", "value/loss")
    return last_tenth(history, keys)


def write_pages(
    folder: Path,
    settings: TrainVLARLSettings,
    history: History,
    newest: Sequence[ActionChunk],
    best: Mapping[str, float] | None = None,
) -> None:
    """Write `report.html`.

    Args:
        newest: the chunks of the last step.
        best: see `RobotEvaluations.summary`; None: there were no evaluations.
    """
    from armature.components.pages.training import write_training_report
    from armature.components.robots.rl.heldout import RobotEvaluations
    from armature.components.robots.rl.page import course_curves, outcome_table

    write_training_report(
        folder,
        title=f"Reinforcement learning on {settings.rollouts.suite}",
        history=history,
        configuration=settings.model_dump(mode="json"),
        figures=RobotEvaluations.figures(best or {}) | _skipped(history),
        tables=[outcome_table([row for row in history if row["step"] > 0])],
        curves=course_curves(newest),
    )


def _skipped(history: History) -> dict[str, str]:
    skipped = sum(row.get("updates_skipped", 0) for row in history)
    return {"optimizer steps skipped, gradient not finite": f"{skipped:.0f}"} if skipped else {}


TRAIN_VLA_RL_STAGE = Stage("train-vla-rl", 3, TrainVLARLSettings, ("policy",), train_vla_rl)
