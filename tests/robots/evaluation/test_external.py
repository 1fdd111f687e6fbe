"""A policy that another program computes, evaluated: the same results as in this process, and conventions compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from armature.components.configuration import build_recipe, load_recipe
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import StageReport
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.datasets.lerobot.reader import open_dataset
from armature.components.robots.datasets.lerobot.writer import create_dataset
from armature.components.robots.datasets.settings import LayoutSettings
from armature.components.robots.datasets.source import DatasetSource
from armature.components.robots.evaluation.results import LiberoResult, read_results
from armature.components.robots.evaluation.robot import (
    libero_conventions,
    libero_robot,
    refuse_external,
    refuse_other_robot,
)
from armature.components.robots.libero.settings import SimulatorSettings
from armature.components.robots.policies.settings import RobotPolicySettings, ServedPolicySettings
from armature.components.robots.policies.source import read_settings
from armature.components.robots.policies.stage import POLICY_STAGE
from armature.components.robots.server.client import ServedPolicy
from tests.refusals import refused
from tests.robots.evaluation.playground import Homing, Plane, settings
from tests.robots.evaluation.test_stage import SIMULATOR, Events, context, evaluate
from tests.robots.server.openpi import LIBERO, external, openpi_server

CAMERAS = ("observation.images.image", "observation.images.image2")
FIELDS = ("observation/image", "observation/wrist_image", "observation/state", "prompt")
SEEDED = {"observation": {**{name: {} for name in FIELDS}, "seed": {"optional": True}}}


def answer(request: dict[str, Any]) -> Any:
    """Answer as `Homing` does."""
    assert np.array_equal(request["observation/image"], request["observation/wrist_image"][::-1])
    seen = RobotObservation({}, request["observation/state"], request["prompt"])
    return Homing().predict([seen], [request["seed"]])[0]


def served(folder: Path, answer: Any = answer, **changes: Any) -> tuple[list[LiberoResult], StageReport]:
    with openpi_server(answer, SEEDED) as (url, _):
        rows = changes.get("rows_per_pass", 1)
        with ServedPolicy(external(url), CAMERAS, Homing.n_action_steps, rows) as policy:
            out, _, report = evaluate(folder, policy, Plane(deaths=(7,)), **changes)  # type: ignore[arg-type]
    return read_results(out), report


def test_served_policy_has_the_results_of_the_same_policy_here_in_every_batch(tmp_path):
    out, _, _ = evaluate(tmp_path / "here", Homing(), Plane())
    here = read_results(out)
    assert 0 < sum(result.success for result in here) < len(here)
    for batch, rows in ((1, 1), (5, 3)):
        results, report = served(tmp_path / f"served{batch}", batch=batch, rows_per_pass=rows)
        assert results == here
        assert list(report.drops) == ["attempts lost with their simulator"]


def test_actions_that_are_not_finite_end_the_evaluation_with_the_episode(tmp_path):
    with refused("actions_not_finite", "task 0 episode 0"):
        served(tmp_path, lambda _: np.full((4, 7), np.nan))


MISMATCHES: dict[str, Any] = {
    "cameras": ("robot0_eye_in_hand", "agentview"),
    "image_rotation": "rotated_180",
    "image_channels": "bgr",
    "state_dimensions": 9,
    "state_rotation": "quaternion_xyzw",
    "length_unit": "mm",
    "action_dimensions": 8,
    "action_target": "absolute_end_effector",
    "action_rotation": "euler_xyz",
    "action_units": "physical",
    "gripper_open": 1.0,
    "gripper_closed": 0.0,
    "control_freq": 10,
}


def fits(policy: ServedPolicySettings, **plan: Any) -> None:
    refuse_external(policy, libero_robot(SIMULATOR), settings(**plan))


def test_every_convention_has_a_planted_mismatch():
    assert MISMATCHES.keys() == type(LIBERO).model_fields.keys()
    fits(external("ws://a"))


@pytest.mark.parametrize("name", MISMATCHES)
def test_mismatch_is_refused_with_both_values(name):
    wrong = external("ws://a", conventions=LIBERO.model_copy(update={name: MISMATCHES[name]}))
    shown = [", ".join(value) if isinstance(value, tuple) else value for value in (MISMATCHES[name],)]
    with refused(
        "conventions_disagree", name, *(f"{value:g}" if isinstance(value, float) else value for value in shown)
    ):
        fits(wrong)


ONE_ROTATED = {"agentview": "upright", "robot0_eye_in_hand": "rotated_180"}


def test_orientation_of_images_may_differ_between_cameras():
    def declared(rotations: Any) -> ServedPolicySettings:
        return external("ws://a", conventions=LIBERO.model_dump() | {"image_rotation": rotations})

    with refused("conventions_disagree", "rotated_180 of robot0_eye_in_hand"):
        fits(declared(ONE_ROTATED))
    fits(declared(dict.fromkeys(ONE_ROTATED, "upright")))
    with refused("value_error", "image_rotation", "agentview"):
        declared({"agentview": "upright"})


@pytest.mark.parametrize(("fps", "warned"), [(10.0, True), (20.0, False)])
def test_dataset_with_another_frequency_is_warned_of(tmp_path, caplog, fps, warned):
    sizes = {"observation.state": 8, "action": 7}
    features = {name: Feature(dtype="float32", shape=(size,)) for name, size in sizes.items()}
    with create_dataset(tmp_path / "d", fps=fps, robot_type=None, features=features, layout=LayoutSettings()) as writer:
        writer.add_episode({name: np.zeros((2, size), np.float32) for name, size in sizes.items()}, "wait")
    dataset = open_dataset(tmp_path / "d")
    source = DatasetSource(dataset, "arm", 1.0, None, "observation.state", "action", {}, [0])
    refuse_other_robot([source], (), SIMULATOR)
    assert ("10 frames per second, and simulator.control_freq is 20" in caplog.text) == warned


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"resolution": 1}, "greater_than_equal"),  # a video needs two rows
        ({"resolution": 20_000}, "less_than_equal"),  # more than renderers support
        ({"camera_name_mapping": {"agentview": "../x"}}, "value_error"),
        ({"camera_name_mapping": {"agentview": ""}}, "value_error"),
    ],
)
def test_rejects_images_that_cannot_be_rendered_or_named(changes, code):
    with refused(code, next(iter(changes))):
        SimulatorSettings.model_validate(changes)


def test_simulator_settings_are_conventions_too():
    slow = SIMULATOR.model_copy(update={"control_freq": 10, "camera_name_mapping": {"agentview": "image"}})
    assert libero_conventions(slow).cameras == ("agentview",)
    with refused("conventions_disagree", "control_freq", "cameras", 10, 20):
        refuse_external(external("ws://a"), libero_robot(slow), settings())


def test_second_policy_is_compared_with_the_simulator_too():
    recipe = load_recipe("evaluate/libero-openpi").values
    wrong = external("ws://a", conventions=LIBERO.model_copy(update={"gripper_open": 1.0}))
    with refused("conventions_disagree", "against.server.conventions"):
        recipe.model_copy(update={"against": RobotPolicySettings(server=wrong)}).refuse_ahead()


def test_rejects_settings_of_an_evaluation_that_would_have_no_effect():
    with refused("setting_without_effect", "evaluation.num_inference_steps"):
        fits(external("ws://a"), num_inference_steps=4)


@pytest.mark.parametrize(
    ("changes", "code", "shown"),
    [
        ({"server": {"url": "http://a:1"}}, "string_pattern_mismatch", "url"),
        ({"server": {"url": "ws://user:word@a:1"}}, "string_pattern_mismatch", "url"),
        ({"server": {"url": "ws://a:70000"}}, "value_error", "range"),
        ({"server": {"camera_fields": ["image"]}}, "value_error", "camera_fields"),
        ({"server": {"state_field": "prompt"}}, "value_error", "state_field"),
        ({"server": {"conventions": None}}, "model_type", "conventions"),
        ({"dtype": "float32"}, "value_error", "dtype"),
    ],
)
def test_rejects_invalid_settings(changes, code, shown):
    policy: dict[str, Any] = {"server": external("ws://a").model_dump(mode="json")}
    policy = {**policy, **changes, "server": policy["server"] | changes.get("server", {})}
    with refused(code, shown):
        build_recipe("evaluate/libero", {"policy": policy}, where="nowhere")


def test_policy_stage_writes_the_settings_that_the_evaluation_reads(tmp_path):
    policy = load_recipe("evaluate/libero-openpi").settings_for(RobotPolicySettings)
    POLICY_STAGE.run(policy, {}, tmp_path, context(tmp_path, Events()))
    assert read_settings(tmp_path) == policy
    assert policy.external is not None and policy.external.conventions == LIBERO


def test_training_refuses_a_policy_of_another_program():
    recipe = load_recipe("train-vla/own-robot-tiny").values
    policy = RobotPolicySettings(server=external("ws://a"))
    with refused("policy_not_trainable", "policy.server"):
        recipe.model_copy(update={"policy": policy}).refuse_sources()
