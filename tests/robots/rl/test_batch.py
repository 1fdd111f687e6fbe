from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from armature.components.contracts.images import ImageRef
from armature.components.robots.rl.batch import build_batch, differing_groups
from armature.components.robots.rl.run import refuse_ratios
from armature.components.robots.rl.settings import EpisodeGroupMean
from armature.components.robots.rl.table import ActionChunk, read_batch, write_batch
from tests.refusals import refused

GRPO = EpisodeGroupMean(name="group_mean")
REF = ImageRef("a" * 64, "image/png", 4, 4)


def answers(group: str, *episodes: tuple[int, float], perturbation: str = "") -> list[ActionChunk]:
    """Return the chunks of a group of episodes with these numbers of chunks and these rewards. The last chunk of an
    episode has its reward."""
    chunks = []
    for number, (count, reward) in enumerate(episodes):
        for chunk in range(count):
            last = chunk == count - 1
            numbers = np.full(6, number + chunk / 8, np.float32)
            chunks.append(
                ActionChunk(
                    group_id=group,
                    episode_id=f"{group}-{number}",
                    suite="libero_spatial",
                    task=0,
                    language="reach",
                    initial_state=3,
                    perturbation=perturbation,
                    chunk=chunk,
                    policy_version=2,
                    cameras=("observation.images.front",),
                    images=(REF,),
                    state=numbers[:2],
                    before=numbers,
                    after=numbers + 1,
                    flow_step=1,
                    tokens=np.arange(chunk, dtype=np.int32),
                    decoded=True,
                    logprobs=numbers[:2].astype(np.float64),
                    actions=numbers[:2],
                    executed=1,
                    reward=reward if last else 0.0,
                    done=last,
                    truncated=last and not reward,
                    value=None,
                    last_value=0.0,
                )
            )
    return chunks


def test_success_rate_of_each_perturbation() -> None:
    plain, light = answers("a", (2, 1.0), (1, 0.0), (3, 0.0)), answers("b", (2, 1.0), (1, 0.0), perturbation="light/1")
    built = build_batch([*plain, *light, *answers("c", (1, 1.0), (1, 1.0), perturbation="light/1")], GRPO)
    rates = {name: value for name, value in built.metrics.items() if name.startswith("success")}
    assert rates == {"success": 4 / 7, "success/none": 1 / 3, "success/light/1": 3 / 4}
    assert "success/none" not in build_batch(plain, GRPO).metrics


def test_group_advantages_equal_hand_computation_and_count_agreeing_groups() -> None:
    built = build_batch(
        [*answers("a", (2, 1.0), (3, 0.0), (3, 0.0), (3, 0.0)), *answers("b", (1, 1.0), (2, 1.0))], GRPO
    )
    mean, std = 0.25, 0.5  # of 1, 0, 0, 0 the sample's: (0.75^2 + 3 * 0.25^2) / 3 = 0.25
    expected = [(1 - mean) / (std + 1e-4)] * 2 + [-mean / (std + 1e-4)] * 9
    assert [each.advantage for each in built.samples] == pytest.approx(expected, rel=1e-12)
    assert built.drops == {"group_agrees": 3}
    assert built.metrics["groups/zero_advantage_fraction"] == 0.5
    assert built.metrics["reward"] == pytest.approx(0.5)
    assert (built.metrics["rollouts/planned"], built.metrics["answers/trained"]) == (6, 11)


def test_group_deviation_can_be_the_population_deviation() -> None:
    advantage = EpisodeGroupMean(name="group_mean", deviation="population")
    built = build_batch(answers("a", (1, 1.0), (1, 0.0), (1, 0.0), (1, 0.0)), advantage)
    assert built.samples[0].advantage == pytest.approx(0.75 / (np.std([1, 0, 0, 0]) + 1e-4), rel=1e-12)


def test_trains_on_the_first_differing_groups_and_counts_the_rest() -> None:
    played = [
        *answers("a", (2, 1.0), (1, 1.0)),
        *answers("b", (1, 1.0), (2, 0.0)),
        *answers("c", (1, 0.0), (1, 1.0)),
        *answers("d", (4, 0.0), (1, 1.0)),
    ]
    assert differing_groups(played) == ["b", "c", "d"]
    built = build_batch(played, GRPO, wanted=2)
    assert [each.group_id for each in built.samples] == ["b"] * 3 + ["c"] * 2
    assert built.drops == {"group_agrees": 3, "surplus_group": 5}
    assert (built.metrics["groups/rounds"], built.metrics["groups/surplus"]) == (2.0, 1.0)
    assert [each.advantage for each in built.samples[:3]] == [
        each.advantage for each in build_batch(played, GRPO).samples[:3]
    ]


def test_batch_roundtrip(tmp_path: Path) -> None:
    samples = build_batch(answers("a", (2, 1.0), (1, 0.0)), GRPO).samples
    write_batch(tmp_path, samples)
    for loaded, written in zip(read_batch(tmp_path), samples, strict=True):
        for name, value in vars(written).items():
            read = getattr(loaded, name)
            if isinstance(value, np.ndarray):
                assert read.dtype == value.dtype and read.tobytes() == value.tobytes()
            else:
                assert read == value


@pytest.mark.parametrize("score", [-7.0 + 2e-5, float("nan"), 1e4, -1e4, float("inf"), float("-inf")])
def test_rejects_ratio_mismatch_at_any_position(score: float) -> None:
    sampled = [3.0, -7.0, 5.0]
    with refused("ratios_mismatch", "preflight.max_ratio_error"):
        refuse_ratios([3.0, score, 5.0], sampled, 1e-5)
    assert refuse_ratios([3.0, -7.0 + 9e-6, 5.0], sampled, 1e-5) == pytest.approx(9e-6, rel=1e-4)
