"""Checks of observations and actions before a family's processor encodes them, and encoding in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.machine import available_cpus
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.norm_stats import Flags, Floats, Normalizer, RobotMetadata

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Call `function` for each item in threads and return the results in order; the first error is raised.

    Threads help because encoding is mostly resizing images, which releases the GIL.
    """
    return list(_threads().map(function, items)) if len(items) > 1 else [function(item) for item in items]


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(available_cpus(), "encode")


def require_robot(robot: RobotMetadata | None, where: Path) -> RobotMetadata:
    """Return the robot's metadata.

    Raises:
        ConfigurationError: `robot` is None.
    """
    if robot is None:
        raise ConfigurationError(
            "the policy has no statistics to normalize by",
            code="normalization_statistics_missing",
            where=str(where),
            remedy="train it on a dataset; for a released MolmoAct2, set policy.norm_tag to an entry of its "
            "norm_stats.json",
        )
    return robot


def refuse_small_model(*needs: tuple[str, int, int]) -> None:
    """Check that the model has room for the robot.

    Args:
        needs: Name of a size, the robot's number, and the model's.

    Raises:
        ConfigurationError: the robot needs more.
    """
    for name, needed, limit in needs:
        if needed > limit:
            raise ConfigurationError(
                f"the robot needs {needed} {name}, the model has only {limit}",
                code="model_too_small",
                where="config.json",
            )


def camera_images(observation: RobotObservation, cameras: Sequence[str], where: str) -> list[Any]:
    """Return the images of the cameras, in their order.

    Raises:
        DataError: a camera is missing, or there are no cameras.
    """
    missing = [camera for camera in cameras if camera not in observation.images]
    if missing or not cameras:
        raise DataError(
            f"the observation has no camera {missing[0]!r}" if missing else "the observation has no camera",
            code="camera_image_missing",
            where=where or f"the observation has {', '.join(observation.images) or 'none'}",
            remedy="set image_keys to the cameras that the observation has",
        )
    return [observation.images[camera] for camera in cameras]


def normalized_state(observation: RobotObservation, normalizer: Normalizer, where: str) -> Floats:
    """Return the normalized state, (dimensions,).

    Raises:
        DataError: the state has another shape.
    """
    state = normalizer.normalize(observation.state, where)
    if state.ndim != 1:
        raise DataError(
            f"the state has the shape {state.shape}, not one dimension", code="dimensions_mismatch", where=where
        )
    return state


def normalized_actions(actions: ArrayLike, normalizer: Normalizer, chunk: int, where: str) -> Floats:
    """Return a normalized chunk of actions, (chunk, dimensions).

    Raises:
        DataError: the chunk has another shape, or a number is not finite.
    """
    values = np.asarray(actions, np.float32)
    if values.shape != (chunk, normalizer.dimensions):
        raise DataError(
            f"actions have the shape {values.shape}, not {(chunk, normalizer.dimensions)}",
            code="chunk_shape_mismatch",
            where=where,
            remedy="set chunk_size to the length of the dataset's windows",
        )
    if not np.isfinite(values).all():
        step, dimension = np.argwhere(~np.isfinite(values))[0]
        raise DataError(
            f"action {normalizer.names[dimension]!r} is {values[step, dimension]} at step {step}",
            code="action_not_finite",
            where=where,
        )
    return normalizer.normalize(values, where)


def past_end(padding: ArrayLike | None, chunk: int, where: str) -> Flags:
    """Return for each step of a chunk whether it is after the end of the episode, (chunk,) bool; None: no step is.

    Raises:
        DataError: `padding` has another shape.
    """
    flags = np.zeros(chunk, bool) if padding is None else np.asarray(padding, bool)
    if flags.shape != (chunk,):
        raise DataError(
            f"padding has the shape {flags.shape}, not {(chunk,)}", code="chunk_shape_mismatch", where=where
        )
    return flags
