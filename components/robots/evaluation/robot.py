"""Check that a policy or dataset fits LIBERO's robot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.datasets.source import DatasetSource
from armature.components.robots.libero.settings import IMAGES, SimulatorSettings

ACTION_SIZE, STATE_SIZE = 7, 8
"""Number of values of an action and of a state. An action has 6 numbers for the end effector and 1 for the gripper. A
state has the position and rotation of the end effector and both fingers. See `LiberoSimulator`."""
_REMEDY = "leave out the sections evaluation and simulator: then the error of held-out actions measures the policy"


def refuse_cameras(wanted: Sequence[str], simulator: SimulatorSettings) -> None:
    """Check that the simulator provides all cameras that the policy uses.

    Raises:
        ConfigurationError: a camera is missing.
    """
    provided = [f"{IMAGES}{name}" for name in simulator.camera_name_mapping.values()]
    if missing := [camera for camera in wanted if camera not in provided]:
        raise ConfigurationError(
            f"the policy uses the cameras {', '.join(missing)}, but the simulator provides {', '.join(provided)}",
            code="simulator_camera_missing",
            where="simulator.camera_name_mapping",
            remedy="map agentview and robot0_eye_in_hand to the policy's names; if the policy is for another robot, "
            + _REMEDY,
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
            refuse_cameras(image_keys or tuple(source.cameras), simulator)
        except ConfigurationError as error:
            problems.setdefault(source.tag, error)
        else:
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
