"""Processors: checks of observations and actions before a family encodes them, and encoding in threads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.machine import available_cpus
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.norm_stats import Flags, Floats, Normalizer, RobotMetadata
from armature.components.robots.policies.settings import RobotPolicySettings

_TOKENIZER_LOCK = Lock()  # a fast tokenizer raises if two threads use it
Item = TypeVar("Item")
Result = TypeVar("Result")


class ModelProcessor(ABC):
    """Encodes observations of one robot, and decodes predictions into its actions.

    cameras: camera keys in the model's order. chunk: number of actions in the robot's data and predictions.
    horizon: number of actions of an example.
    """

    def __init__(
        self, config: Any, tokenizer: Any, settings: RobotPolicySettings, robot: RobotMetadata, gripper: bool = True
    ) -> None:
        """
        Args:
            tokenizer: The checkpoint's tokenizer, a transformers fast tokenizer.
            gripper: Normalize the gripper's dimension like the others.

        Raises:
            ConfigurationError: the robot's statistics do not fit the normalization.
        """
        self.config, self.tokenizer, self.settings, self.robot = config, tokenizer, settings, robot
        self.chunk = self.horizon = settings.chunk_size
        self.cameras = settings.image_keys or robot.camera_keys
        self.state = Normalizer.build("state", robot.state_stats, settings.state_normalization, gripper)
        self.action = Normalizer.build("action", robot.action_stats, settings.action_normalization, gripper)

    @property
    def state_dimensions(self) -> int:
        """Number of dimensions of a state."""
        return self.state.dimensions

    @property
    def action_dimensions(self) -> int:
        """Number of dimensions of an action."""
        return self.action.dimensions

    @abstractmethod
    def encode(
        self,
        observation: RobotObservation,
        actions: ArrayLike | None = None,
        padding: ArrayLike | None = None,
        where: str = "",
    ) -> Any:
        """Encode an observation, and for training the actions that followed it.

        Args:
            actions: (chunk, dimensions) in the dataset's units; None at inference.
            padding: (chunk,) True for steps after the end of the episode.
            where: Dataset, episode and frame, for error messages.

        Raises:
            DataError: a camera is missing, a shape is wrong, a number is not finite, or the example is too long.
        """

    @abstractmethod
    def batch(self, examples: Sequence[Any], rows: Sequence[Sequence[int]] | None, multiple: int) -> Any:
        """Make a `ModelBatch` with one example in each row, or with the examples whose indices `rows` lists.

        Rows are padded to a multiple of `multiple`, as the family counts it.
        """

    def decode(self, actions: ArrayLike) -> Floats:
        """Convert normalized actions (..., T, D) to float32 (..., chunk, dimensions) in the dataset's units.

        T is at least `chunk` and D at least `action_dimensions`; padding beyond both is cut off.
        """
        return self.action.restore(np.asarray(actions)[..., : self.chunk, : self.action_dimensions])

    def token_ids(self, text: str, **options: Any) -> NDArray[np.int64]:
        """Return the token ids of a text; `options` are the tokenizer's."""
        with _TOKENIZER_LOCK:
            return np.array(self.tokenizer(text, **options)["input_ids"], np.int64)


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
            remedy="train it on a dataset, or use the complete folder of a trained policy (LeRobot's statistics are "
            "beside policy_preprocessor.json); for a released MolmoAct2, set policy.norm_tag to an entry of its "
            "norm_stats.json",
        )
    return robot


def require_cameras(cameras: Sequence[str]) -> None:
    """Check that there are cameras.

    Raises:
        ConfigurationError: there are none.
    """
    if not cameras:
        raise ConfigurationError(
            "the policy has no cameras",
            code="cameras_missing",
            where="policy.image_keys",
            remedy="set it to the cameras in the policy's order",
        )


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
        DataError: a camera is missing, there are no cameras, or an image is not uint8 of shape (height, width, 3).
    """
    missing = [camera for camera in cameras if camera not in observation.images]
    if missing or not cameras:
        raise DataError(
            f"the observation has no camera {missing[0]!r}" if missing else "the observation has no camera",
            code="camera_image_missing",
            where=where or f"the observation has {', '.join(observation.images) or 'none'}",
            remedy="set image_keys to the cameras that the observation has",
        )
    images = [observation.images[camera] for camera in cameras]
    for camera, image in zip(cameras, images, strict=True):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3 or not image.size:
            raise DataError(
                f"an image is {image.dtype} of shape {image.shape}, not uint8 of shape (height, width, 3)",
                code="invalid_image_array",
                where=f"{where}, {camera}" if where else camera,
                remedy="convert it to RGB",
            )
    return images


def normalized_state(observation: RobotObservation, normalizer: Normalizer, where: str, finite: bool = False) -> Floats:
    """Return the normalized state, (dimensions,).

    Args:
        finite: Refuse a state with a number that is not finite.

    Raises:
        DataError: the state has another shape, or is not finite.
    """
    state = normalizer.normalize(observation.state, where)
    if state.ndim != 1:
        raise DataError(
            f"the state has the shape {state.shape}, not one dimension", code="dimensions_mismatch", where=where
        )
    if finite and not np.isfinite(state).all():
        raise DataError(
            f"state {normalizer.names[int(np.argmin(np.isfinite(state)))]!r} is not finite",
            code="observation_not_finite",
            where=where,
            remedy="correct the frame, or leave out its episode",
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
