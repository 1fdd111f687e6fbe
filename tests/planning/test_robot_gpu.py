"""What data sheets predict for robot policies, against the seconds measured on GPUs."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from armature.components.configuration import load_recipe
from armature.components.environments.libero.tasks import suite_tasks
from armature.components.planning.clock import VirtualLoop
from armature.components.planning.gpus import GPUS
from armature.components.planning.robots.costs import RobotCosts
from armature.components.planning.robots.estimate import RobotAssumptions, estimated_robot_costs
from armature.components.planning.robots.geometry import PolicyGeometry, policy_geometry
from armature.components.planning.robots.play import SimulatedPlay
from armature.components.planning.robots.workload import RobotEpisode
from armature.components.policies.settings import RobotPolicySettings
from armature.components.vla_rl.schedule import plan_step
from armature.components.vla_rl.settings import RobotRolloutSettings, TrainVLARLSettings
from benchmarks.model_sizes import policy_config_of
from tests.environments.libero.simulated import needs_libero

DOCS = Path(__file__).parents[2] / "docs"
EPISODES, ACTIONS, SLOTS, PROCESSES, ROWS, CHUNK = 192, 120, 64, 16, 32, 10
"""Of `benchmarks.vla_rl_gpu`."""


@cache
def released() -> PolicyGeometry:
    """A MolmoAct2 of the released sizes, two cameras, 10 Euler steps."""
    settings = RobotPolicySettings(checkpoint_path="allenai/MolmoAct2-LIBERO", num_inference_steps=10, dtype="bfloat16")
    return policy_geometry(policy_config_of("allenai/MolmoAct2-LIBERO"), settings, 2)


def costs(gpu: str, rows: int, mode: str = "expert", quantization: str | None = None) -> RobotCosts:
    settings = load_recipe("train-vla-rl/molmoact2-spatial").settings_for(TrainVLARLSettings)
    assert isinstance(settings, TrainVLARLSettings)
    rollouts = settings.rollouts.model_copy(update={"rows_per_pass": rows, "quantization": quantization})
    trainer = settings.trainer.model_copy(update={"mode": mode})
    simulator = settings.simulator.model_copy(update={"num_steps_wait": 10})
    return estimated_robot_costs(released(), GPUS[gpu], RobotAssumptions(), rollouts, trainer, simulator, ranks=1)


def answers(rows: int) -> float:
    return costs("h200", rows).policy.pass_seconds


def update(mode: str) -> float:
    found = costs("h200", 1, mode).trainer
    return 32 * found.answer_seconds + found.update_seconds


def played() -> float:
    """All episodes, by simulators that have played a first round of other tasks; the policy's seconds are the
    measured ones of its 32 rows, the simulators' those of that time. A step began then as if no slot had a simulator,
    which is as it was measured."""
    then = {"build_seconds": 9.15, "reset_seconds": 1.15, "action_seconds": 0.034}
    found = costs("h100", ROWS).replaced({"policy": {"pass_seconds": 0.466}, "simulators": then}, "measured")
    settings = RobotRolloutSettings(
        suite="libero_spatial",
        groups_per_step=EPISODES,
        group_size=1,
        max_steps=ACTIONS,
        batch=SLOTS,
        rows_per_pass=ROWS,
    )
    tasks, play, loop = suite_tasks("libero_spatial"), SimulatedPlay(found, PROCESSES), VirtualLoop()
    first, second = ([one for group in plan_step(settings, tasks, step) for one in group] for step in (1, 2))
    failed = RobotEpisode(ACTIONS, False, 0.0)
    loop.run_until_complete(play.play(first[:SLOTS], lambda _: failed, SLOTS, CHUNK))
    play._held.clear()
    began = loop.time()
    loop.run_until_complete(play.play(second, lambda _: failed, SLOTS, CHUNK))
    seconds = loop.time() - began
    loop.close()
    return seconds


CASES = [
    ("H200", "one answer of a MolmoAct2 of 5.44 B", lambda: answers(1), 0.033, "| 33 ms |"),
    ("H200", "8 answers", lambda: answers(8), 0.1005, "| 101 ms |"),
    ("H200", "32 answers", lambda: answers(32), 0.338, "| 338 ms |"),
    ("H200", "an update of 32 examples, the expert alone", lambda: update("expert"), 0.5745, "| 575 ms |"),
    ("H200", "of 32 examples, all weights", lambda: update("full"), 1.592, "| 1,592 ms |"),
    ("H200", "of 32 examples, LoRA", lambda: update("lora"), 1.758, "| 1,758 ms |"),
    pytest.param(
        "H100", "192 episodes of 120 actions, 64 at once in 16 processes", played, 105.0, "105 s", marks=needs_libero
    ),
]


@pytest.mark.parametrize(("gpu", "what", "predict", "measured", "as_said"), CASES)
def test_what_gpus_took_is_predicted_within_a_fifth(
    gpu: str, what: str, predict: object, measured: float, as_said: str
) -> None:
    assert callable(predict)
    predicted = predict()
    assert predicted == pytest.approx(measured, rel=0.2)
    assert as_said in (DOCS / "benchmarks.md").read_text()
    row = f"| {gpu} | {what} | {predicted:.2f} s | {measured:.2f} s | {predicted / measured - 1:+.0%} |"
    assert row.replace("%", " %") in (DOCS / "planning.md").read_text(), row


def test_products_in_8_bits_take_the_share_that_was_measured_of_what_grows_with_rows() -> None:
    plain, fp8 = ([costs("h200", rows, quantization=one) for rows in (1, 32)] for one in (None, "fp8"))
    growth = [many.policy.pass_seconds - single.policy.pass_seconds for single, many in (plain, fp8)]
    assert growth[1] == pytest.approx(0.8 * growth[0])
    assert fp8[0].trainer.answer_seconds == pytest.approx(0.8 * plain[0].trainer.answer_seconds)
    assert costs("h200", 1, "full", "fp8").trainer == costs("h200", 1, "full").trainer
    assert "fp8_time" in fp8[0].sources["policy.pass_seconds"] and "fp8" not in plain[0].sources["policy.pass_seconds"]
