"""Training on several robots with different dimensions, horizons and statistics."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.mixture import Mixture
from armature.components.robots.datasets.source import DatasetSource, open_sources
from armature.components.robots.imitation.data import Encoder
from armature.components.robots.imitation.learner import PolicyLearner
from armature.components.robots.imitation.robots import robots_of
from armature.components.robots.imitation.trainer import assemble
from armature.components.robots.policies.family import load_model
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy, save_policy
from armature.components.robots.policies.molmoact2.modeling.losses import LossPlan
from armature.components.robots.policies.settings import RobotPolicySettings
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import Ranks
from tests.refusals import refused

from .conftest import policy_settings
from .settings import training_settings
from .test_smolvla import POLICY


@pytest.fixture
def sources(inputs: dict[str, Path]) -> tuple[DatasetSource, DatasetSource]:
    (only,) = open_sources(inputs["dataset"])
    return replace(only, tag="arm"), replace(only, tag="slow", horizon=2, action="observation.state")


@pytest.fixture
def statistics(inputs: dict[str, Path]) -> dict[str, dict[str, object]]:
    document = json.loads((inputs["statistics"] / "stats.json").read_text())
    return {"arm": document, "slow": document}


def test_loss_of_mixed_robots_is_the_mean_of_their_own_losses(
    inputs: dict[str, Path], sources: tuple[DatasetSource, DatasetSource], statistics: dict[str, dict[str, object]]
) -> None:
    policy, training = policy_settings(), training_settings()
    robots = robots_of(inputs["policy"], policy, sources, statistics)
    mixture = Mixture(sources, 3, 0)
    encoder = Encoder(robots.processors(), robots.saved().config, policy, training)
    samples = [mixture[position] for position in range(8)]
    examples = [encoder.example(sample) for sample in samples]
    tags = [sample.tag for sample in samples]
    assert set(tags) == {"arm", "slow"}
    for tag, example in zip(tags, examples, strict=True):
        horizon, dimensions = {"arm": (3, 3), "slow": (2, 2)}[tag]
        assert example.actions is not None and example.horizon_padding is not None
        assert (~example.horizon_padding).sum() == horizon and (~example.dimension_padding).sum() == dimensions
        assert not example.actions[horizon:].any() and not example.actions[:, dimensions:].any()
    learner = PolicyLearner(load_model(inputs["policy"], robots.saved()), training, LossPlan.of(policy))
    together = learner.score([encoder.micro_batch(examples, range(8))])["loss"]
    alone = [learner.score([encoder.micro_batch([one], [seed])])["loss"] for seed, one in enumerate(examples)]
    assert together == pytest.approx(np.mean(alone), rel=1e-5)


def test_family_without_join_refuses_several_robots(
    inputs: dict[str, Path], sources: tuple[DatasetSource, DatasetSource], statistics: dict[str, dict[str, object]]
) -> None:
    with refused("robots_unsupported", "arm, slow"):
        robots_of(inputs["policy"], RobotPolicySettings.model_validate(POLICY), sources, statistics)


def test_policy_of_several_robots_needs_a_norm_tag(
    inputs: dict[str, Path],
    sources: tuple[DatasetSource, DatasetSource],
    statistics: dict[str, dict[str, object]],
    tmp_path: Path,
) -> None:
    robots = robots_of(inputs["policy"], policy_settings(), sources, statistics)
    parts = robots.saved()
    save_policy(tmp_path / "saved", parts, load_model(inputs["policy"], parts).state_dict())
    with refused("normalization_statistics_missing", tmp_path / "saved", "policy.norm_tag"):
        load_policy(tmp_path / "saved").processor()
    loaded = load_policy(tmp_path / "saved", policy_settings(tiny=None, norm_tag="slow"))
    assert (loaded.settings.chunk_size, loaded.processor().action_dimensions) == (2, 2)
    assert torch.isfinite(next(loaded.model.parameters())).all()


def test_rejects_missing_statistics_and_different_horizons_of_a_tag(
    inputs: dict[str, Path], sources: tuple[DatasetSource, DatasetSource], statistics: dict[str, dict[str, object]]
) -> None:
    first, second = sources
    with refused("statistics_missing", "'slow'", "arm"):
        robots_of(inputs["policy"], policy_settings(), sources, {"arm": statistics["arm"]})
    with refused("horizon_mismatch", "dataset.sources", "None", 2):
        robots_of(inputs["policy"], policy_settings(), (first, replace(second, tag="arm")), statistics)


@pytest.mark.parametrize(
    ("changes", "shown"),
    [({"fps": 30.0}, "fps is 10.0"), ({"names": ["gripper", "dx", "dy"]}, "('gripper', 'dx', 'dy')")],
)
def test_rejects_other_frequencies_and_orders_of_dimensions_in_a_tag(
    inputs: dict[str, Path], sources: tuple[DatasetSource, DatasetSource], tmp_path: Path, changes: Any, shown: str
) -> None:
    shutil.copytree(inputs["dataset"] / "dataset", tmp_path / "other")
    info = json.loads((tmp_path / "other/meta/info.json").read_text())
    (info if "fps" in changes else info["features"]["action"]).update(changes)
    (tmp_path / "other/meta/info.json").write_text(json.dumps(info))
    other = replace(sources[0], dataset=open_dataset(tmp_path / "other"))
    with refused("robots_of_tag_differ", "'arm'", shown, tmp_path / "other"):
        robots_of(inputs["policy"], policy_settings(), (sources[0], other), {})


def test_errors_of_robots_with_different_dimensions_are_measured_together(
    inputs: dict[str, Path], sources: tuple[DatasetSource, DatasetSource], statistics: dict[str, dict[str, object]]
) -> None:
    training = training_settings(heldout={"fraction": 0.5, "frames": 8, "every": 1})
    parts = (inputs["policy"], policy_settings(), training, sources, statistics, TrainerProcesses(), Ranks())
    measured = assemble(*parts).measure()
    assert measured["heldout/action_error"] > 0 and measured["heldout/mean_action_error"] > 0


def test_rejects_actions_that_never_change(
    inputs: dict[str, Path], sources: tuple[DatasetSource, DatasetSource], statistics: dict[str, dict[str, object]]
) -> None:
    constant = {"min": [1.0] * 3, "max": [1.0] * 3, "q01": [1.0] * 3, "q99": [1.0] * 3}
    with refused("constant_actions", "'action'", sources[0].dataset.files):
        robots_of(inputs["policy"], policy_settings(), sources[:1], {"arm": statistics["arm"] | {"action": constant}})


def test_rejects_norm_tag_with_another_horizon_than_the_dataset(
    inputs: dict[str, Path],
    sources: tuple[DatasetSource, DatasetSource],
    statistics: dict[str, dict[str, object]],
    tmp_path: Path,
) -> None:
    parts = robots_of(inputs["policy"], policy_settings(), sources, statistics).saved()
    save_policy(tmp_path / "saved", parts, load_model(inputs["policy"], parts).state_dict())
    tagged = policy_settings(tiny=None, norm_tag="slow", n_action_steps=2)
    other = replace(sources[1], horizon=None)
    with refused("horizon_mismatch", "'slow'", "policy.chunk_size = 2", 3):
        robots_of(tmp_path / "saved", tagged, (other,), statistics)
    fitting = robots_of(tmp_path / "saved", tagged, (sources[1],), statistics)
    assert fitting.horizon == 2


def test_cameras_of_the_dataset_are_used_if_those_of_the_norm_tag_are_missing(
    inputs: dict[str, Path],
    sources: tuple[DatasetSource, DatasetSource],
    statistics: dict[str, dict[str, object]],
    tmp_path: Path,
) -> None:
    parts = robots_of(inputs["policy"], policy_settings(), sources[:1], statistics).saved()
    other = parts.robot.model_copy(update={"camera_keys": ("observation.images.elsewhere",)})
    save_policy(tmp_path / "saved", replace(parts, robot=other), load_model(inputs["policy"], parts).state_dict())
    tagged = policy_settings(tiny=None, norm_tag="trained")
    robots = robots_of(tmp_path / "saved", tagged, sources[:1], statistics)
    cameras = tuple(sources[0].cameras)
    assert cameras and robots.parts["arm"].settings.image_keys == cameras
    named = policy_settings(tiny=None, norm_tag="trained", image_keys=cameras[:1])
    assert robots_of(tmp_path / "saved", named, sources[:1], statistics).parts["arm"].settings.image_keys == cameras[:1]
