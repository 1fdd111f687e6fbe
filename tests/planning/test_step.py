"""Predicted seconds of a step compared with formulas by hand, and with measured times from docs/benchmarks.md."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from transformers import PretrainedConfig, Qwen2_5_VLConfig, Qwen2VLConfig

from armature.components.configuration import load_recipe
from armature.components.models.settings import ModelSettings
from armature.components.planning.memory import GPUS, ModelSizes, model_sizes
from armature.components.planning.step import (
    Assumptions,
    LanguagePlan,
    Mfu,
    StepTime,
    TrainerCosts,
    Transfer,
    sync_seconds,
    trainer_costs,
)
from armature.components.rl.settings import TrainVLMSettings
from armature.components.robots.planning import (
    PolicySizes,
    RobotAssumptions,
    RobotCosts,
    policy_sizes,
    robot_costs,
    robot_step,
)
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.robots.rl.settings import TrainVLARLSettings
from armature.components.vlm.settings import TrainerSettings
from benchmarks.model_sizes import policy_config_of
from benchmarks.step_case import TEXT, VISION
from tests.builders import make_machine
from tests.refusals import refused

DOCS = Path(__file__).parents[2] / "docs"


@cache
def sizes(small: bool = False) -> ModelSizes:
    """Sizes of Qwen2.5-VL-3B as in the benchmarks, or of Qwen2-VL-2B if `small`."""
    config: PretrainedConfig = Qwen2_5_VLConfig(text_config=TEXT, vision_config=VISION, tie_word_embeddings=True)
    if small:
        text = TEXT | {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28}
        text |= {"num_attention_heads": 12}
        vision = {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16}
        config = Qwen2VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True)
    settings = ModelSettings(source="none", gradient_checkpointing=True)
    return model_sizes(config, settings, _trainer(), "bfloat16")


def _trainer() -> TrainerSettings:
    return TrainerSettings(learning_rate=1e-6, max_steps=1)


def costs(gpu: str, mfu: Mfu = "compiled_mfu", small: bool = False, ranks: int = 1) -> TrainerCosts:
    return trainer_costs(sizes(small), GPUS[gpu], Assumptions(), mfu, ranks)


def step(tokens: int, mfu: Mfu = "compiled_mfu", small: bool = False, micro: int = 1, ranks: int = 1) -> float:
    """Predict the seconds of a rank for `tokens` tokens in `micro` equal micro-batches."""
    return sum(costs("h200", mfu, small, ranks).seconds(tokens, micro).values())


def sync(transfer: Transfer) -> float:
    return sum(sync_seconds(sizes(), GPUS["h100"], Assumptions(), 1, transfer))


@cache
def released() -> PolicySizes:
    """Sizes of the released MolmoAct2 with two cameras and 10 Euler steps."""
    settings = RobotPolicySettings(checkpoint_path="allenai/MolmoAct2-LIBERO", num_inference_steps=10, dtype="bfloat16")
    return policy_sizes(policy_config_of("allenai/MolmoAct2-LIBERO"), settings, 2)


def robot_settings(mode: str = "expert", **rollouts: object) -> TrainVLARLSettings:
    settings = load_recipe("train-vla-rl/molmoact2-spatial").settings_for(TrainVLARLSettings)
    assert isinstance(settings, TrainVLARLSettings)
    return settings.model_copy(
        update={
            "rollouts": settings.rollouts.model_copy(update=rollouts),
            "trainer": settings.trainer.model_copy(update={"mode": mode}),
            "simulator": settings.simulator.model_copy(update={"num_steps_wait": 10}),
        }
    )


def of_robots(rows: int, mode: str = "expert", quantization: str | None = None) -> RobotCosts:
    settings = robot_settings(mode, rows_per_pass=rows, quantization=quantization)
    return robot_costs(released(), GPUS["h200"], RobotAssumptions(), settings, ranks=1)


def update(mode: str) -> float:
    """Predict the seconds of an update on 32 examples."""
    seconds = of_robots(1, mode)
    return max(32 * seconds.answer, seconds.micro_batch) + seconds.update


def played() -> float:
    """Predict the seconds of the rollouts of `benchmarks.vla_rl_gpu`: 192 episodes of 120 actions, 64 at once in 16
    processes, with the measured seconds of policy and simulators."""
    seconds = replace(of_robots(32), policy_pass=0.466, build=9.15, reset=1.15, action=0.034)
    settings = robot_settings(groups_per_step=192, group_size=1, max_steps=120, batch=64, rows_per_pass=32)
    failed = RobotAssumptions(success=0.0)
    return sum(robot_step(seconds, failed, settings, tasks=10, chunk=10, processes=16, ranks=1).rollouts.values())


CASES = [
    ("H200", "3.75 B, case A, activations recomputed", step(18_989), 0.977, "977 ms"),
    ("H200", "case B, recomputed", step(68_141), 3.136, "3,136 ms"),
    ("H200", "case C, recomputed", step(39_679), 1.864, "1,864 ms"),
    ("H200", "case A, activations kept", step(18_989, "kept_mfu"), 0.750, "750 ms"),
    ("H200", "case B, kept", step(68_156, "kept_mfu", micro=4), 2.464, "2,464 ms"),
    ("H200", "case C, kept", step(39_689, "kept_mfu", micro=3), 1.514, "1,514 ms"),
    ("H200", "case A, packed, not compiled", step(18_989, "packed_mfu"), 1.38, "1.38 s"),
    ("H200", "three micro-batches in place of one", step(18_989, "packed_mfu", micro=3), 2.31, "2.31 s"),
    ("H200", "case A, not packed", step(37_504, "trainer_mfu", micro=4), 4.46, "4.46 s"),
    ("H200", "2.2 B, 64 samples of 574 tokens, not packed", step(36_736, "trainer_mfu", True, micro=3), 3.2, "3.2 s"),
    ("H200", "case B on one of two GPUs", step(68_141), 3.267, "3,267 ms"),
    ("H200", "case B on two, split", step(34_073, ranks=2), 1.892, "1,892 ms"),
    ("H100", "new weights of 3.75 B by `ipc`", sync("ipc"), 0.92, "0.92 s"),
    ("H100", "by `file`, to one server", sync("file"), 15.94, "15.94 s"),
    ("H100", "by `delta`", sync("delta"), 3.98, "3.98 s"),
    ("H100", "by `adapter`", sync("adapter"), 1.16, "1.16 s"),
    ("H200", "one answer of a MolmoAct2 of 5.44 B", of_robots(1).policy_pass, 0.033, "| 33 ms |"),
    ("H200", "8 answers", of_robots(8).policy_pass, 0.1005, "| 101 ms |"),
    ("H200", "32 answers", of_robots(32).policy_pass, 0.338, "| 338 ms |"),
    ("H200", "an update of 32 examples, the expert alone", update("expert"), 0.5745, "| 575 ms |"),
    ("H200", "of 32 examples, all weights", update("full"), 1.592, "| 1,592 ms |"),
    ("H200", "of 32 examples, LoRA", update("lora"), 1.758, "| 1,758 ms |"),
    ("H100", "192 episodes of 120 actions, 64 at once in 16 processes", played(), 105.0, "105 s"),
]


@pytest.mark.parametrize(("gpu", "what", "predicted", "measured", "written"), CASES, ids=[case[1] for case in CASES])
def test_prediction_is_within_20_percent_of_measurement(
    gpu: str, what: str, predicted: float, measured: float, written: str
) -> None:
    assert predicted == pytest.approx(measured, rel=0.2)
    assert written in (DOCS / "benchmarks.md").read_text()
    row = f"| {gpu} | {what} | {predicted:.2f} s | {measured:.2f} s | {predicted / measured - 1:+.0%} |"
    assert row.replace("%", " %") in (DOCS / "planning.md").read_text(), row


def test_collectives_between_nodes_use_network_of_all_gpus() -> None:
    """Each byte enters a node once, over the network of its eight GPUs together."""
    within, beyond = (GPUS["a100"].collective(ranks) for ranks in (8, 16))
    assert (within, beyond) == (300e9, 200e9)
    assert costs("h100").exposed == costs("h100").gather == 0


def test_exposed_collectives_are_counted() -> None:
    """A rank with few tokens still waits for its host, for each collective, and for weights outside of blocks."""
    alone, split = (costs("h100", ranks=ranks) for ranks in (1, 2))
    assumed, blocks = Assumptions(), sizes().blocks + 1
    root = 6 * sizes().root / 2 / (450e9 * assumed.network_share)
    assert split.exposed == pytest.approx(3 * blocks * assumed.collective_seconds + root)
    assert split.token == pytest.approx(alone.token * 2 * 1775 / 3225)
    assert split.micro_batch == alone.micro_batch == pytest.approx(0.115)


def test_fp8_speeds_up_time_per_row_as_measured() -> None:
    plain, fp8 = ([of_robots(rows, quantization=one) for rows in (1, 32)] for one in (None, "fp8"))
    growth = [many.policy_pass - single.policy_pass for single, many in (plain, fp8)]
    assert growth[1] == pytest.approx(0.8 * growth[0])
    assert fp8[0].answer == pytest.approx(0.8 * plain[0].answer)
    assert of_robots(1, "full", "fp8").answer == of_robots(1, "full").answer


def test_gathering_is_hidden_behind_computing() -> None:
    costs = TrainerCosts(token=0.01, micro_batch=1.0, gather=30.0, exposed=0.5, update=2.0)
    assert sum(costs.seconds(6000, 2).values()) == 60 + 2 * (1 + 0.5) + 2
    assert sum(costs.seconds(1000, 2, updates=2).values()) == 2 * 30 + 2 * (1 + 0.5) + 2 * 2


def test_overlapping_step_takes_as_long_as_longer_side() -> None:
    parts = {"rollouts": {"servers": 3.0, "environments": 1.0}, "training": {"computes": 3.5}, "others": {"sync": 1.0}}
    in_turn, ahead = StepTime(**parts, overlaps=False), StepTime(**parts, overlaps=True)
    assert (in_turn.seconds, ahead.seconds) == (8.5, 5.0)
    assert in_turn.bottleneck() == ("computes", 3.5 / 8.5) and ahead.bottleneck() == ("servers", 3 / 5)


ASSUMED = Assumptions(
    turns=4, dialogue=True, prompt_tokens=500, turn_tokens=100, completion_tokens=50, environment_seconds=2, longest=1.5
)


def planned(assumed: Assumptions = ASSUMED, gpu: str = "h100", **machine: object) -> LanguagePlan:
    """Plan steps of 8 groups of 8 rollouts, with an event loop that takes no time."""
    settings = load_recipe("train-vlm/colors", ["rollouts.groups_per_step=8"]).settings_for(TrainVLMSettings)
    assert isinstance(settings, TrainVLMSettings)
    idle = assumed.model_copy(update={"request_seconds": 0.0, "image_seconds": 0.0})
    return LanguagePlan(settings, make_machine(**machine), sizes(), GPUS[gpu], idle)


def test_rollout_seconds_equal_formula_by_hand() -> None:
    plan = planned()
    seconds, bandwidth = plan.step(servers=2, ranks=1).rollouts, 0.7 * 3.35e12
    each_pass = 0.003 + 2 * sizes().parameters / bandwidth
    token = 2 * sizes().parameters / (0.4 * 989e12)
    # 32 sequences on each server; an answer attends to its prompt, 1.5 earlier turns of 150 tokens and half of itself.
    cache = sizes().key_value_bytes * (500 + 1.5 * 150 + 25) / bandwidth
    assert seconds["servers read weights"] == pytest.approx(4 * 50 * each_pass)
    prompts = 32 * (500 / 8 + 3 * 100)  # the group's first prompt is computed once
    assert seconds["servers compute tokens"] == pytest.approx(32 * 200 * (token + cache) + prompts * token)
    assert seconds["the longest episodes"] == pytest.approx(0.5 * 200 * (each_pass + token + cache))
    assert seconds["environments"] == 4 * 2
    assert seconds["too few environments at once"] == 0
    few = planned(servers__arguments={"max_num_seqs": 8}).step(servers=2, ranks=1).rollouts
    assert few["servers read weights"] == pytest.approx(4 * seconds["servers read weights"])


@pytest.mark.parametrize("servers", [2, 64, 512])
def test_too_few_environments_limit_rollouts_with_any_servers(servers: int) -> None:
    """64 episodes, 8 at once, are played in eight waves; the first one takes as long as a whole step otherwise."""
    plan = planned(workers__environments=8, max_concurrent=8)
    seconds = plan.step(servers, ranks=1).rollouts
    each_pass = 0.003 + 2 * sizes().parameters / (0.7 * 3.35e12)
    assert seconds["too few environments at once"] == pytest.approx(7 * (4 * 50 * each_pass + 4 * 2))


def test_training_seconds_equal_ranks_part_of_tokens() -> None:
    plan = planned()
    each, trainer = 500 + 3 * 100 + 4 * 50, plan.settings.trainer
    assert not trainer.packing and ASSUMED.trained_tokens(8, packing=True) == each - 500 + 500 / 8
    for ranks, rows in ((1, 64), (4, 16), (64, 1), (512, 1)):
        costs = trainer_costs(sizes(), GPUS["h100"], plan.assumed, "trainer_mfu", ranks)
        assert plan.step(1, ranks).training["the trainer computes"] == pytest.approx(rows * each * costs.token)


def test_best_division_has_shortest_step() -> None:
    plan = planned()
    best = plan.best(8)
    assert plan.step(*best).seconds == min(plan.step(8 - ranks, ranks).seconds for ranks in (1, 2, 4))
    assert [plan.best(64)[1] % 8, sum(plan.best(64))] == [0, 64]
    with refused("gpus_too_few", 1):
        plan.best(1)
