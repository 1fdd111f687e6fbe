"""Whether a policy that is trained on a dataset can be played on LIBERO's robot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.datasets.source import DatasetSource
from armature.components.robots.libero.settings import IMAGES, SimulatorSettings

ACTION_SIZE, STATE_SIZE = 7, 8
"""Six of the end effector and the gripper; position, rotation and both fingers. See `LiberoSimulator`."""
_REMEDY = "leave out the sections evaluation and simulator: the error of held-out actions is the measure then"


def refuse_cameras(wanted: Sequence[str], simulator: SimulatorSettings) -> None:
    """
    Raises:
        ConfigurationError: the simulator does not give a camera that the policy looks through.
    """
    given = [f"{IMAGES}{name}" for name in simulator.camera_name_mapping.values()]
    if missing := [camera for camera in wanted if camera not in given]:
        raise ConfigurationError(
            f"the policy looks through {', '.join(missing)}, and the simulator gives {', '.join(given)}",
            code="simulator_camera_missing",
            where="simulator.camera_name_mapping",
            remedy=f"map agentview and robot0_eye_in_hand to the policy's names; of another robot, {_REMEDY}",
        )


def refuse_other_robot(
    sources: Sequence[DatasetSource], image_keys: Sequence[str], simulator: SimulatorSettings
) -> None:
    """Refuse before hours of training what the evaluation after it would refuse.

    Args:
        sources: the datasets; of several robots, one has to be LIBERO's.
        image_keys: the policy's cameras; empty: the dataset's.

    Raises:
        ConfigurationError: the robot of every dataset has other actions, states or cameras than LIBERO's.
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
                f"the dataset's {what} have the shape {list(shape)}, those of LIBERO's robot [{size}]",
                code="feature_shape_mismatch",
                where=f"feature {name!r} of {source.dataset.files}",
                remedy=_REMEDY,
            )
