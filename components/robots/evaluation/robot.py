"""Conventions of LIBERO's robot, and checks that a policy or dataset fits it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.machine.project import project_source
from armature.components.robots.datasets.source import DatasetSource
from armature.components.robots.evaluation.settings import PolicyEvaluationSettings
from armature.components.robots.libero.settings import IMAGES, SimulatorSettings
from armature.components.robots.policies.lerobot.process import lerobot_facts
from armature.components.robots.policies.settings import LeRobotPolicySettings, RobotConventions, ServedPolicySettings

log = logging.getLogger(__name__)

ACTION_SIZE, STATE_SIZE = 7, 8
"""Number of values of an action and of a state. An action has 6 numbers for the end effector and 1 for the gripper. A
state has the position and rotation of the end effector and both fingers. See `LiberoSimulator`."""
COMPUTED_HERE = (
    "inference_action_mode",
    "num_inference_steps",
    "image_attention_at_inference",
    "torch_compile",
    "quantization",
)
"""Settings of an evaluation that only have an effect if its own process computes the policy."""
_CONVERT = (
    "use a policy that was trained with the simulator's conventions, or convert on the policy's side; change a "
    "declaration only if it is wrong about the training data"
)
_REMEDY = "leave out the sections evaluation and simulator: then the error of held-out actions measures the policy"


@dataclass(frozen=True)
class SimulatedRobot:
    """The robot of a simulator: its conventions, and the images of its cameras.

    cameras: names of features by name of the camera in the simulator, from the setting `where`. resolution: height and
    width of images.
    """

    conventions: RobotConventions
    cameras: Mapping[str, str]
    resolution: int
    where: str


def libero_robot(simulator: SimulatorSettings) -> SimulatedRobot:
    """Return LIBERO's robot."""
    names = {camera: f"{IMAGES}{name}" for camera, name in simulator.camera_name_mapping.items()}
    return SimulatedRobot(libero_conventions(simulator), names, simulator.resolution, "simulator.camera_name_mapping")


def libero_conventions(simulator: SimulatorSettings) -> RobotConventions:
    """Return the conventions of LIBERO's actions and of our observations, the same as in its datasets."""
    return RobotConventions(
        cameras=tuple(simulator.camera_name_mapping),
        image_rotation="upright",
        image_channels="rgb",
        state_dimensions=STATE_SIZE,
        state_rotation="axis_angle",
        length_unit="m",
        action_dimensions=ACTION_SIZE,
        action_target="delta_end_effector",
        action_rotation="axis_angle",
        action_units="normalized",
        gripper_open=-1.0,
        gripper_closed=1.0,
        control_freq=simulator.control_freq,
    )


def refuse_disagreement(
    name: str,
    declared: Mapping[str, Any],
    other_name: str,
    other: Mapping[str, Any],
    remedy: str = _CONVERT,
) -> None:
    """Check that two sides have the same values for all conventions that `declared` has.

    Example:
        >>> libero = libero_conventions(SimulatorSettings()).model_dump()
        >>> refuse_disagreement("the policy", {"gripper_open": -1.0}, "the simulator", libero)

    Args:
        name: name of the side that declares, for the message; for example a setting.
        other_name: name of the other side.
        remedy: what to do, if the policy is not one of the sides.

    Raises:
        ConfigurationError: the sides disagree. The error lists each pair that does.
    """
    pairs = [
        f"{field} is {_shown(value)} in {name}, {_shown(other[field])} in {other_name}"
        for field, value in declared.items()
        if other[field] != value
    ]
    if pairs:
        raise ConfigurationError(
            "; ".join(pairs),
            code="conventions_disagree",
            where=f"{name}, {other_name}",
            remedy=remedy,
        )


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{each} of {name}" for name, each in value.items())
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse_external(
    external: ServedPolicySettings | LeRobotPolicySettings,
    robot: SimulatedRobot,
    plan: PolicyEvaluationSettings,
    section: str = "policy",
) -> None:
    """Check that a policy of another program fits the simulator and the settings of the evaluation.

    Args:
        section: the recipe's section that names the policy.

    Raises:
        ConfigurationError: their conventions disagree, or a setting would have no effect.
    """
    declared = external.conventions.model_dump()
    name = f"{section}.{'lerobot' if isinstance(external, LeRobotPolicySettings) else 'server'}"
    refuse_disagreement(f"{name}.conventions", declared, "the simulator", robot.conventions.model_dump())
    if isinstance(external, LeRobotPolicySettings):
        facts = lerobot_facts(Path(project_source(external.path)))
        sizes = {"state_dimensions": facts.state_dimensions, "action_dimensions": facts.action_dimensions}
        views = [robot.cameras[camera] for camera in declared["cameras"]]
        shape = (3, robot.resolution, robot.resolution)
        refuse_disagreement(
            "the policy's config.json",
            {**sizes, "cameras": tuple(facts.cameras), "images": tuple(facts.cameras.values())},
            "the simulator",
            {**declared, "cameras": tuple(views), "images": (shape,) * len(views)},
        )
    fields = PolicyEvaluationSettings.model_fields
    if unused := [name for name in COMPUTED_HERE if getattr(plan, name) != fields[name].default]:
        raise ConfigurationError(
            f"{', '.join(unused)} would have no effect, because another program computes the policy",
            code="setting_without_effect",
            where=", ".join(f"evaluation.{name}" for name in unused),
            remedy="leave it out here, and set it in the program that computes the policy",
        )


def refuse_cameras(wanted: Sequence[str], robot: SimulatedRobot) -> None:
    """Check that the simulator provides all cameras that the policy uses.

    Raises:
        ConfigurationError: a camera is missing.
    """
    provided = list(robot.cameras.values())
    if missing := [camera for camera in wanted if camera not in provided]:
        raise ConfigurationError(
            f"the policy uses the cameras {', '.join(missing)}, but the simulator provides {', '.join(provided)}",
            code="simulator_camera_missing",
            where=robot.where,
            remedy=f"map {' and '.join(robot.cameras)} to the policy's names; to train a policy of another robot, "
            f"{_REMEDY}",
        )


def refuse_other_robot(
    sources: Sequence[DatasetSource], image_keys: Sequence[str], simulator: SimulatorSettings
) -> None:
    """Check, before hours of training, that at least one dataset is of LIBERO's robot, as the evaluation needs.

    Args:
        sources: the datasets, possibly of several robots.
        image_keys: the policy's cameras; empty: the cameras of the dataset.

    Raises:
        ConfigurationError: every dataset has other actions, states or cameras than LIBERO's robot.
    """
    problems: dict[str, ConfigurationError] = {}
    for source in sources:
        try:
            _refuse_sizes(source)
            refuse_cameras(image_keys or tuple(source.cameras), libero_robot(simulator))
        except ConfigurationError as error:
            problems.setdefault(source.tag, error)
        else:
            # Not refused, because some published datasets of LIBERO say 10 although their actions are of 20 Hz.
            if (fps := source.dataset.info.fps) != simulator.control_freq:
                log.warning(
                    "%s has %g frames per second, and simulator.control_freq is %d: unless fps is wrong, the policy "
                    "will move too fast or too slowly",
                    source.dataset.files,
                    fps,
                    simulator.control_freq,
                )
            return
    if problems:
        raise next(iter(problems.values()))


def _refuse_sizes(source: DatasetSource) -> None:
    named: Mapping[str, tuple[str | None, int]] = {
        "actions": (source.action, ACTION_SIZE),
        "states": (source.state, STATE_SIZE),
    }
    for what, (name, size) in named.items():
        if name is not None and (shape := tuple(source.dataset.feature(name).shape)) != (size,):
            raise ConfigurationError(
                f"the dataset's {what} have the shape {list(shape)}, LIBERO's robot needs [{size}]",
                code="feature_shape_mismatch",
                where=f"feature {name!r} of {source.dataset.files}",
                remedy=_REMEDY,
            )
