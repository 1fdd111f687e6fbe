"""Every algorithm that the settings can name: its recipe loads, and its batch has that algorithm's advantages."""

from __future__ import annotations

import tomllib
from collections import Counter
from typing import Any

import pytest

from armature.components.configuration import CONFIGS, Recipe, build_recipe, read_toml
from armature.components.contracts.batches import Sample, TurnAdvantages
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.models.adapters.sequences import merge_turns, sample_of
from armature.components.rollouts.batches.table import build_batch
from armature.components.rollouts.sampler import choose_groups
from armature.components.vlm.settings import TrainerSettings

from .conftest import walk

GROUP_STD = 'advantage = { name = "group_mean", scale = "group_std" }'
UNSCALED = 'advantage = { name = "group_mean", scale = "none" }'
GIGPO = """advantage.name = "gigpo"
advantage.gamma = 0.5
advantage.step_weight = 1.0
advantage.statistics = "trajectories"
advantage.norm = { name = "mean_norm" }
advantage.anchor = { name = "exact" }"""
PPO = 'name = "ppo"\nclip_low = 0.2\nclip_high = 0.2'
CLIP_HIGHER = 'name = "ppo"\nclip_low = 0.2\nclip_high = 0.28'
SEQUENCE = 'name = "gspo"\nclip_low = 3e-4\nclip_high = 4e-4'

# In group 1 the rollouts earn 4, 2 and 0 and are at x, y; x; x. In group 2 both earn 1, one of them a turn later.
OUTPUTS = GenerateOutputs(
    [
        walk("a", "xy", [0, 4], group="1"),
        walk("b", "x", [2], group="1"),
        walk("c", "x", [0], group="1"),
        walk("d", "x", [1], group="2"),
        walk("e", "xy", [0, 1], group="2"),
    ]
)
SCALED = 2 / (2 + 1e-4)  # rewards 4, 2 and 0 have the sample variance 8 / (3 - 1)
FIRST_GROUP = {"a": [SCALED, SCALED], "b": [0.0], "c": [-SCALED]}
PLAIN = {"a": [2.0, 2.0], "b": [0.0], "c": [-2.0]}
# At x the returns are 2, 2, 0 in group 1 and 1, 0.5 in group 2.
IN_GROUPS = {"a": [2 + 2 / 3, 2.0], "b": [2 / 3], "c": [-2 - 4 / 3]}
ALGORITHMS = {
    "grpo": (GROUP_STD, PPO, "token", 1, FIRST_GROUP),
    "dr_grpo": (UNSCALED, PPO, "dr_grpo", 1, PLAIN),
    "gspo": (GROUP_STD, SEQUENCE, "sequence", 1, FIRST_GROUP),
    "dapo": (GROUP_STD, CLIP_HIGHER, "token", 10, FIRST_GROUP),
    "rloo": ('advantage = { name = "rloo" }', PPO, "token", 1, {"a": [3.0, 3.0], "b": [0.0], "c": [-3.0]}),
    "gigpo": (GIGPO, PPO, "token", 1, IN_GROUPS | {"d": [0.25], "e": [-0.25, 0.0]}),
    "gigpo-dynamic": (GIGPO, CLIP_HIGHER, "token", 10, IN_GROUPS),
}


class TurnsAsSamples:
    """An adapter that makes samples of trajectories and drops nothing."""

    def samples(self, outputs: GenerateOutputs, advantages: TurnAdvantages) -> tuple[list[Sample], Counter[str]]:
        merged = [(one, turns) for one in outputs.trajectories for turns in merge_turns(one.turns, False)]
        return [sample_of(one, turns, advantages) for one, turns in merged], Counter()


def recipe(batches: str, objective: str, aggregation: str, max_rounds: int) -> Recipe:
    values: dict[str, Any] = read_toml(CONFIGS / "train-vlm" / "colors.toml")
    rest = "skip_zero_advantage = true\nmax_sequence_tokens = 64\npenalty = { format = 0.1, inadmissible = 0.0 }"
    values["batches"] = tomllib.loads(f"{batches}\n{rest}")
    length = {"dr_grpo_length": 4} if aggregation == "dr_grpo" else {}
    values["trainer"] |= {"objective": tomllib.loads(objective), "aggregation": aggregation, **length}
    values["rollouts"] |= {"max_rounds": max_rounds, "groups_per_step": 2}
    return build_recipe("train-vlm/example", values, "example.toml")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_recipe_of_each_algorithm_builds_its_batch(name):
    *values, expected = ALGORITHMS[name]
    sections = recipe(*values).sections
    rollouts, batches, trainer = (sections[key] for key in ("rollouts", "batches", "trainer"))
    assert isinstance(trainer, TrainerSettings) and trainer.objective.name in values[1]
    chosen = choose_groups(OUTPUTS, rollouts)
    built = build_batch(chosen.outputs, TurnsAsSamples(), batches)
    result: dict[str, list[float]] = {}
    for sample in built.samples:
        result.setdefault(sample.trajectory_id, []).append(float(sample.advantages[sample.loss_mask][0]))
    assert result == {key: pytest.approx(turns) for key, turns in expected.items()}
    if "d" in expected:  # group 2 has equal rewards, and only its turns tell who was faster
        assert not built.drops and not chosen.drops
    elif rollouts.max_rounds > 1:
        assert chosen.drops == {"equal_rewards_group": 2} and not built.drops
    else:
        assert built.drops == {"zero_advantage_group": 3} and not chosen.drops
