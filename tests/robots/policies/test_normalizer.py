"""Normalization and norm_stats.json, compared with numbers computed by hand."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.datasets import quantiles
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.policies.norm_stats import (
    FeatureNormStats,
    Normalizer,
    NormStats,
    RobotMetadata,
    norm_stats,
    resolve,
    robot_metadata,
)
from armature.components.robots.policies.settings import Normalization
from tests.refusals import codes, refused
from tests.robots.policies.plain import policy_settings

NAMES = ("x", "left_Gripper", "z")
ENDS = {"min": (-3.0, -1.0, 5.0), "max": (9.0, 1.0, 5.0), "q01": (-2.0, -1.0, 5.0), "q99": (6.0, 1.0, 5.0)}
STATS = FeatureNormStats(**ENDS, mean=(1.0, 0.0, 5.0), std=(2.0, 0.5, 0.0), names=NAMES)


def test_quantiles_map_to_plus_minus_one_with_clipping() -> None:
    normalizer = Normalizer.build("action", STATS, "quantiles", normalize_gripper=False)
    assert normalizer.mask.tolist() == [True, False, True]
    values = [[-2, -0.25, 5], [6, 0.5, 5], [2, 1, 5], [4, 0, 6], [90, 0, 4]]
    wanted = [[-1, -0.25, -1], [1, 0.5, -1], [0, 1, -1], [0.5, 0, 1], [1, 0, -1]]
    assert normalizer.normalize(values).tolist() == wanted
    assert normalizer.normalize(values).dtype == np.float32
    restored = normalizer.restore([[-1, -0.25, -1], [0.5, 3, -1], [7, 0, 1]])
    assert restored.tolist() == [[-2, -0.25, 5], [4, 1, 5], [6, 0, 5]]


def test_mean_std_does_not_clip() -> None:
    normalizer = Normalizer.build("state", STATS, "mean_std", normalize_gripper=True)
    assert normalizer.normalize([7, -1, 5]).tolist() == [3, -2, 0]
    assert normalizer.restore([3, -2, 4]).tolist() == [7, -1, 5]


def test_identity_only_clips() -> None:
    normalizer = Normalizer.build("state", STATS, "identity", normalize_gripper=True)
    assert normalizer.normalize([0.25, -4, 5]).tolist() == [0.25, -1, 1]
    assert normalizer.restore([0.25, -4, 5]).tolist() == [0.25, -1, 1]


@settings(max_examples=100)
@given(st.lists(st.tuples(st.floats(-50, 50), st.floats(0.01, 100), st.floats(0, 1)), min_size=1, max_size=8))
def test_values_between_quantiles_round_trip(dimensions: list[tuple[float, float, float]]) -> None:
    low, span, part = (np.array(column) for column in zip(*dimensions, strict=True))
    stats = FeatureNormStats(q01=tuple(low), q99=tuple(low + span))
    normalizer = Normalizer.build("action", stats, "quantiles", normalize_gripper=True)
    values = low + part * span
    restored = normalizer.restore(normalizer.normalize(values))
    assert np.abs(restored - values).max() <= 1e-6 * (np.abs(low) + span).max() * 4


def test_gripper_is_found_by_mask_or_name() -> None:
    def mask(stats: FeatureNormStats, gripper: bool = False) -> list[bool]:
        return Normalizer.build("state", stats, "quantiles", gripper).mask.tolist()

    assert mask(STATS.model_copy(update={"mask": (True, True, False), "max": None, "min": None})) == [True, True, False]
    assert mask(STATS.model_copy(update={"mask": (True, False, True)}), gripper=True) == [True, True, True]
    for names in (None, ("x", "gripper")):
        with refused("gripper_unnamed", "normalize_gripper"):
            mask(STATS.model_copy(update={"names": names}))


def test_libero_does_not_normalize_gripper_dimensions() -> None:
    ends = {"q01": (-0.5,) * 8, "q99": (0.5,) * 8}
    state = FeatureNormStats(**ends, names=("x", "y", "z", "rx", "ry", "rz", "rw", "gripper"))
    assert Normalizer.build("state", state, "quantiles", False).mask.tolist() == [True] * 7 + [False]


def test_rejects_gripper_out_of_range() -> None:
    with refused("gripper_range_exceeded", "action 'left_Gripper'", -40, "normalize_gripper"):
        Normalizer.build("action", STATS.model_copy(update={"min": (0.0, -40.0, 5.0)}), "quantiles", False)
    normalizer = Normalizer.build("action", STATS, "quantiles", normalize_gripper=False)
    with refused("gripper_out_of_range", "'left_Gripper'", 1.5, "step 2", "episode 7"):
        normalizer.normalize([[0, 0, 0], [0, 1, 0], [0, 1.5, 0]], where="episode 7")
    with refused("dimensions_mismatch", (4,), 3):
        normalizer.normalize([0, 0, 0, 0])


def measured(values: NDArray[np.float32], names: tuple[str, ...]) -> FeatureNormStats:
    """Return the statistics of a dataset's robot in which the quantiles are widened."""
    _, parts = quantiles.measure(values, [len(values)], "action")
    document = quantiles.merge([parts]).statistics().document()
    feature = Feature(dtype="float32", shape=(len(names),), names=list(names))
    features = {"observation.state": feature, "action": feature}
    robot = robot_metadata(dict.fromkeys(features, document), features, policy_settings())
    assert robot.state_stats == robot.action_stats
    return robot.action_stats


def rare(rest: float, other: float, count: int, noise: float = 0.0, frames: int = 2000) -> NDArray[np.float32]:
    values = rest + noise * np.random.default_rng(0).uniform(-1, 1, frames)
    values[70 : 70 + count] = other
    return values.astype(np.float32)


RARE = {
    "closes": rare(-1, 1, 15),
    "opens": rare(1, -1, 15),
    "once": rare(0, 0.04, 1),
    "far": rare(5e3, 5e3 + 1, 19),
    "noise_of_float32": rare(-1, 1, 15, 1e-7),
    "between": rare(-1, 1, 20),
    "between_of_few": rare(-1, 1, 2, frames=150),
    "between_and_opens": rare(1, 0, 2, frames=130),
    "between_with_noise": rare(-1, 1, 2, 1e-3, frames=150),
    "sensor_noise": rare(-1, 1, 15, 1e-3),
    "much_noise": rare(0, 90, 19, 0.3),
}


@pytest.mark.parametrize("mode", ["quantiles", "mean_std"])
@pytest.mark.parametrize("name", RARE)
def test_rarely_moving_dimension_round_trips(name: str, mode: Normalization) -> None:
    steps = np.sin(np.arange(len(RARE[name]))).astype(np.float32)
    values = np.stack([steps, RARE[name], np.full(len(steps), 0.3, np.float32)], axis=1)
    moving = "gripper" if "noise" in name else "valve"
    stats = measured(values, ("x", moving, "still"))
    normalizer = Normalizer.build("action", stats, mode, normalize_gripper=True)
    restored = normalizer.restore(normalizer.normalize(values))
    spread = np.ptp(values[:, 1])
    assert np.abs(restored - values)[:, 1].max() <= 1e-4 * spread + 2 * np.spacing(np.abs(values[:, 1]).max())
    assert np.abs(restored[:, 2] - values[:, 2]).max() <= 1e-7
    expected = np.quantile(values[:, 0].astype(np.float64), [0.01, 0.99])
    assert ((stats.q01 or ())[0], (stats.q99 or ())[0]) == tuple(expected)


def test_quantiles_of_other_dimensions_are_not_widened() -> None:
    tails = np.random.default_rng(1).standard_t(2, 2000).astype(np.float32)
    values = np.stack([rare(0, 1e4, 1, 1.0), rare(0, 1, 30), tails, np.where(np.abs(tails) > 3, tails, 0)], axis=1)
    stats = measured(values, ("x", "gripper", "tails", "rests_with_tails"))
    expected = np.quantile(values.astype(np.float64), [0.01, 0.99], axis=0)
    np.testing.assert_array_equal([stats.q01, stats.q99], expected)
    Normalizer.build("action", stats, "quantiles", normalize_gripper=True)


@settings(max_examples=100, deadline=None)
@given(st.integers(20, 400), st.integers(1, 20), st.floats(-10, 10), st.floats(-10, 10))
def test_binary_dimension_is_restored_exactly_or_rejected(frames: int, count: int, rest: float, other: float) -> None:
    """Two values in any proportion: with widened statistics both round-trip; others are rejected if they do not."""
    values = np.full((frames, 1), rest, np.float32)
    values[:count] = other
    _, parts = quantiles.measure(values, [frames], "action")
    plain = FeatureNormStats(**quantiles.merge([parts]).statistics().document(), names=("valve",))
    for stats in (plain, measured(values, ("valve",))):
        try:
            normalizer = Normalizer.build("action", stats, "quantiles", normalize_gripper=True)
        except ConfigurationError as error:
            assert stats is plain and codes(error) == {"unusable_statistics"}
            continue
        restored = normalizer.restore(normalizer.normalize(values))
        assert np.abs(restored - values).max() <= 1e-3 * np.ptp(values) + 1e-6 * np.abs(values).max()


def refuses(mode: Normalization, dimension: str, **numbers: tuple[float, float, float]) -> None:
    with refused("unusable_statistics", f"action {dimension}"):
        Normalizer.build("action", STATS.model_copy(update=numbers), mode, normalize_gripper=True)


@pytest.mark.parametrize("gripper", [0.0, 1e-9, 1e-3])
def test_rejects_action_that_no_prediction_reaches(gripper: float) -> None:
    q01, q99 = (-2.0, -1.0, 5.0), (6.0, -1.0 + gripper, 5.0)
    refuses("quantiles", "'left_Gripper'", q01=q01, q99=q99)
    stats = STATS.model_copy(update={"q01": q01, "q99": q99})
    Normalizer.build("action", stats, "quantiles", normalize_gripper=False)  # the gripper is not normalized
    assert Normalizer.build("state", stats, "quantiles", True).normalize([0, 1, 5])[1] == 1  # the released behavior
    unknown = STATS.model_copy(update={"q01": q01, "q99": q99, "min": None, "max": None})
    Normalizer.build("action", unknown, "quantiles", normalize_gripper=True)


@pytest.mark.parametrize(
    ("mode", "numbers"),
    [
        ("quantiles", {"q01": (7.0, -1.0, 5.0)}),
        ("quantiles", {"q99": (1e39, 1.0, 5.0)}),
        ("quantiles", {"q01": (-3e38, -1.0, 5.0), "q99": (3e38, 1.0, 5.0)}),
        ("quantiles", {"min": (10.0, -1.0, 5.0)}),
        ("mean_std", {"mean": (1e39, 0.0, 5.0)}),
        ("mean_std", {"std": (-1.0, 0.5, 0.0)}),
        ("mean_std", {"std": (0.0, 0.5, 0.0)}),
        ("mean_std", {"std": (1e-9, 0.5, 0.0)}),
        ("identity", {"min": (-1.0, -1.0, 0.0), "max": (1.5, 1.0, 1.0)}),
        ("identity", {"min": (-1.5, -1.0, 0.0), "max": (0.0, 1.0, 1.0)}),
    ],
)
def test_rejects_contradictory_statistics(mode: Normalization, numbers: dict[str, tuple[float, float, float]]) -> None:
    refuses(mode, "'x'", **numbers)


@pytest.mark.parametrize("std", [1e-10, 1e-8, 3e-7])
def test_small_deviations_round_trip(std: float) -> None:
    stats = FeatureNormStats(mean=(0.0, 0.0), std=(std, 0.0), min=(-9 * std, 0.0), max=(9 * std, 0.0))
    normalizer = Normalizer.build("action", stats, "mean_std", normalize_gripper=True)
    values = np.array([[9 * std, 0], [-2 * std, 0]])
    np.testing.assert_allclose(normalizer.restore(normalizer.normalize(values)), values, rtol=1e-6)


def test_rejects_missing_statistics_of_a_mode() -> None:
    with refused("statistics_incomplete", "q01", "q99", "quantile-stats"):
        Normalizer.build("action", FeatureNormStats(mean=(0.0,), std=(1.0,)), "quantiles", True)
    with refused("value_error", {"mean": 2, "std": 1}):
        FeatureNormStats(mean=(0.0, 1.0), std=(1.0,))


ACTION_STATS = {"q01": [0.1], "q99": [0.2], "count": [273465], "mask": [True], "new": "kept"}
STATE_STATS = {"q01": [0, -1.5], "q99": [0.2, 1], "names": ["a", "gripper"], "count": 9}
LIBERO = {
    "action_key": "action",
    "state_keys": ["observation.state"],
    "camera_keys": ["observation.images.image", "observation.images.wrist_image"],
    "normalize_gripper": False,
    "action_horizon": 10,
    "n_action_steps": 8,
    "setup_type": "single franka robotic arm in libero",
    "control_mode": "delta end-effector pose",
    "comment": {"kept": [1]},
}
FILE = {
    "format": "molmoact2_norm_stats.v1",
    "norm_mode": "q01_q99",
    "metadata_by_tag": {
        "libero": LIBERO | {"action_stats": ACTION_STATS, "state_stats": STATE_STATS},
        "so100": {"action_stats": {"mean": [0.0]}, "state_stats": {"mean": [0.0]}},
    },
}


def test_norm_stats_file_round_trips(tmp_path: Path) -> None:
    (tmp_path / "in.json").write_text(json.dumps(FILE))
    stats = NormStats.load(tmp_path / "in.json")
    stats.save(tmp_path / "out.json")
    assert json.loads((tmp_path / "out.json").read_text()) == FILE
    assert stats.select("libero").action_stats.mask == (True,)
    with refused("unknown_norm_tag", "'droid'", "libero, so100"):
        stats.select("droid")


@pytest.mark.parametrize(
    ("content", "code", "place"),
    [
        (None, "checkpoint_file_missing", ""),
        ("{", "invalid_json", ""),
        (json.dumps(FILE | {"format": "v2"}), "invalid_statistics", "format"),
        (json.dumps(FILE | {"metadata_by_tag": {"a": {}}}), "invalid_statistics", "a.action_stats"),
        (json.dumps(FILE).replace("[0.1]", "[NaN]"), "invalid_json", "q01"),
    ],
    ids=["missing", "cut", "version", "tag", "nan"],
)
def test_rejects_invalid_norm_stats_file(content: str | None, code: str, place: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "norm_stats.json").write_text(content)
    with refused(code, tmp_path / "norm_stats.json", place):
        NormStats.load(tmp_path / "norm_stats.json")


def test_norm_tag_sets_horizon_and_completes_empty_settings() -> None:
    robot = NormStats.model_validate(FILE).select("libero")
    resolved = resolve(policy_settings(chunk_size=30, n_action_steps=30), robot)
    assert (resolved.chunk_size, resolved.n_action_steps) == (10, 8)
    assert resolved.setup_type == "single franka robotic arm in libero"
    assert resolved.image_keys == robot.camera_keys
    overridden = resolve(policy_settings(setup_type="mine", image_keys=("a",)), robot)
    assert (overridden.setup_type, overridden.control_mode, overridden.image_keys) == (
        "mine",
        "delta end-effector pose",
        ("a",),
    )
    other = ("observation.images.front",)
    assert resolve(policy_settings(), robot, available=other).image_keys == other
    assert resolve(policy_settings(), robot, available=(*robot.camera_keys, "more")).image_keys == robot.camera_keys
    with refused("chunk_too_short", 30, 10):
        resolve(policy_settings(n_action_steps=30), robot.model_copy(update={"n_action_steps": None}))


def test_dataset_metadata_has_the_form_of_norm_stats() -> None:
    entry = {"min": [0.0], "max": [1.0], "q01": [0.0], "q99": [1.0], "count": [5], "other": [1, 2]}
    features = {
        "observation.state": Feature(dtype="float32", shape=(1,), names={"motors": ["joint"]}),
        "observation.images.a": Feature(dtype="video", shape=(8, 8, 3)),
        "action": Feature(dtype="float32", shape=(1,), names=["gripper"]),
    }
    robot = robot_metadata({"observation.state": entry, "action": entry}, features, policy_settings(setup_type="arm"))
    assert (robot.state_stats.names, robot.action_stats.names) == (("joint",), ("gripper",))
    assert robot.camera_keys == ("observation.images.a",)
    document = norm_stats({"mine": robot}, policy_settings()).model_dump(mode="json", exclude_unset=True)
    assert document["norm_mode"] == "q01_q99"
    assert NormStats.model_validate(document).select("mine") == robot
    with refused("statistics_missing", "'action'", "quantile-stats"):
        robot_metadata({"observation.state": entry}, features, policy_settings())


def test_null_setup_type_is_read_as_empty_text() -> None:
    robot = RobotMetadata(action_stats=STATS, state_stats=STATS, setup_type=None)  # type: ignore[arg-type]
    assert robot.setup_type == ""
