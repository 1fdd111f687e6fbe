"""Statistics and metadata of robots (norm_stats.json), and the normalization of states and actions by them.

norm_stats.json of a checkpoint has an entry for each robot, under a tag. An entry holds the statistics of state and
action, and the cameras, prompt words and horizon that the checkpoint was trained with. Datasets use the same form.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FiniteFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.policies.settings import Normalization, RobotPolicySettings
from armature.components.robots.policies.source import read_json

log = logging.getLogger(__name__)

FORMAT = "molmoact2_norm_stats.v1"
STATE, ACTION = "observation.state", "action"
NORM_MODES = {"quantiles": "q01_q99", "mean_std": "mean_std", "identity": "identity"}
_ARRAYS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")

RARE, RARE_GRIPPER = 1e-5, 1e-2
"""Limits of the share (q99 - q01) / (max - min) for ordinary dimensions and grippers.

A dimension with a smaller share counts as moving rarely.

The limit of ordinary dimensions is small, because outliers also make this share small, and outliers should be clipped.
A gripper has no outliers, but noise while it rests, so its limit is larger.
"""

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
Numbers = tuple[FiniteFloat, ...]
Words = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]
"""Words that norm_stats.json provides for the prompt; null in the file is read as ""."""


class FeatureNormStats(BaseModel):
    """Statistics of one feature, one number per dimension.

    `mask` is False for dimensions that are not normalized, such as a gripper's.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    min: Numbers | None = None
    max: Numbers | None = None
    mean: Numbers | None = None
    std: Numbers | None = None
    q01: Numbers | None = None
    q10: Numbers | None = None
    q50: Numbers | None = None
    q90: Numbers | None = None
    q99: Numbers | None = None
    count: int | tuple[int, ...] | None = None
    names: tuple[str, ...] | None = None
    mask: tuple[bool, ...] | None = None

    @model_validator(mode="after")
    def _one_width(self) -> FeatureNormStats:
        widths = {name: len(value) for name in (*_ARRAYS, "mask") if (value := getattr(self, name)) is not None}
        if len(set(widths.values())) != 1:
            raise ValueError(f"statistics need one number per dimension, but have {widths or 'no numbers'}")
        return self

    @property
    def dimensions(self) -> int:
        """Number of dimensions of the feature."""
        return next(len(value) for name in _ARRAYS if (value := getattr(self, name)) is not None)

    @property
    def _grippers(self) -> NDArray[np.bool_]:
        """True for dimensions with "gripper" in their name, shape (dimensions,); all False without names."""
        names = self.names if self.names is not None and len(self.names) == self.dimensions else ()
        return np.array(["gripper" in name.lower() for name in names] or [False] * self.dimensions)

    def narrow(self, share: float | NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return a mask (dimensions,) of dimensions with q99 - q01 < `share` (max - min).

        Grippers use q90 - q10 instead, if available, because a gripper that moves rarely may have its q99 anywhere
        between the resting position and the moves. Also, min or max must be more than 0.1 (max - min) outside of
        q01 and q99.
        """
        if self.q01 is None or self.q99 is None or self.min is None or self.max is None:
            return np.zeros(self.dimensions, bool)
        rows = (self.q01, self.q99, self.min, self.max, self.q10 or self.q01, self.q90 or self.q99)
        with np.errstate(over="ignore", invalid="ignore"):
            q01, q99, low, high, q10, q90 = (np.array(each, np.float32) for each in rows)
            inner = np.where(self._grippers, q90 - q10, q99 - q01)
            clipped = np.maximum(high - q99, q01 - low)
            narrow: NDArray[np.bool_] = (high > low) & (inner < share * (high - low)) & (clipped > 0.1 * (high - low))
        return narrow

    def rarely_moving(self) -> NDArray[np.bool_]:
        """Return a mask (dimensions,) of dimensions whose quantiles cut off values that the policy needs.

        No number in [-1, 1] stands for a value outside the quantiles, so a gripper, for example, could never close.
        A dimension counts if it is `narrow`, or has only two different values and the quantiles clip one of them.
        """
        rare = self.narrow(np.where(self._grippers, RARE_GRIPPER, RARE))
        if None in (self.q01, self.q99, self.min, self.max, self.mean, self.std):
            return rare
        q01, q99, low, high, mean, std = (
            np.array(each, np.float64) for each in (self.q01, self.q99, self.min, self.max, self.mean, self.std)
        )
        # Bhatia and Davis (2000): a variance is at most (max - mean) (mean - min), with equality only for two values.
        largest = (high - mean) * (mean - low)
        two_values = (high > low) & (np.abs(std * std - largest) <= 1e-3 * np.abs(largest))
        clipped = np.maximum(high - q99, q01 - low) > 1e-3 * (high - low)
        rarely: NDArray[np.bool_] = rare | (two_values & clipped)
        return rarely

    def widened(self) -> FeatureNormStats:
        """Return statistics in which min and max replace q01 and q99 of the dimensions that move rarely."""
        ends = {name: list(getattr(self, name) or ()) for name in ("q01", "q99", "min", "max")}
        for place in np.flatnonzero(self.rarely_moving()):
            ends["q01"][place], ends["q99"][place] = ends["min"][place], ends["max"][place]
        changed = {name: tuple(ends[name]) for name in ("q01", "q99") if ends[name]}
        return self.model_copy(update=changed)


class RobotMetadata(BaseModel):
    """Statistics and metadata of a robot, or of a dataset. Undeclared fields of the file are kept."""

    model_config = ConfigDict(extra="allow", frozen=True)

    action_key: str = ACTION
    state_key: str | None = None
    state_keys: tuple[str, ...] | None = None
    camera_keys: tuple[str, ...] = ()
    normalize_gripper: bool | None = None
    action_horizon: PositiveInt | None = None
    n_action_steps: PositiveInt | None = None
    setup_type: Words = ""
    control_mode: Words = ""
    action_stats: FeatureNormStats
    state_stats: FeatureNormStats


class NormStats(BaseModel):
    """Content of norm_stats.json."""

    model_config = ConfigDict(extra="allow", frozen=True)

    format: Literal["molmoact2_norm_stats.v1"]
    norm_mode: str
    metadata_by_tag: dict[str, RobotMetadata]

    @classmethod
    def load(cls, path: Path) -> NormStats:
        """Read a norm_stats.json.

        Raises:
            DataError: the file is missing, or does not have this format.
        """
        document = read_json(path)
        try:
            return cls.model_validate(document)
        except ValidationError as error:
            raise DataError(_first(error), code="invalid_statistics", where=str(path)) from error

    def save(self, path: Path) -> None:
        """Write the file."""
        path.write_text(json.dumps(self.model_dump(mode="json", exclude_unset=True), indent=2) + "\n")

    def select(self, tag: str) -> RobotMetadata:
        """Return the entry of `tag`.

        Raises:
            ConfigurationError: there is no entry for this tag.
        """
        if tag not in self.metadata_by_tag:
            raise ConfigurationError(
                f"there are no statistics for norm_tag {tag!r}",
                code="unknown_norm_tag",
                where="norm_stats.json",
                remedy=f"use one of {', '.join(sorted(self.metadata_by_tag)) or 'none: the file is empty'}",
            )
        return self.metadata_by_tag[tag]


def norm_stats(robots: Mapping[str, RobotMetadata], settings: RobotPolicySettings) -> NormStats:
    """Return the content of norm_stats.json for `robots`, which are given by tag.

    Its field `norm_mode` is set to the normalization of actions in `settings`.
    """
    mode = NORM_MODES[settings.action_normalization]
    return NormStats(format=FORMAT, norm_mode=mode, metadata_by_tag=dict(robots))


def robot_metadata(
    statistics: Mapping[str, Mapping[str, Any]], features: Mapping[str, Feature], settings: RobotPolicySettings
) -> RobotMetadata:
    """Return the metadata of a dataset's robot; quantiles of dimensions that move rarely are widened.

    Args:
        statistics: LeRobot's stats.json.
        features: Features of info.json. The names of a feature's dimensions tell which one is the gripper.

    Raises:
        DataError: state or action, or their statistics, are missing or invalid.
    """
    return RobotMetadata(
        action_key=ACTION,
        state_key=STATE,
        camera_keys=settings.image_keys or tuple(key for key, feature in features.items() if feature.is_visual),
        normalize_gripper=settings.normalize_gripper,
        action_horizon=settings.chunk_size,
        n_action_steps=settings.n_action_steps,
        setup_type=settings.setup_type,
        control_mode=settings.control_mode,
        action_stats=_feature_stats(ACTION, statistics, features),
        state_stats=_feature_stats(STATE, statistics, features),
    )


def resolve(
    settings: RobotPolicySettings, robot: RobotMetadata, available: Sequence[str] | None = None
) -> RobotPolicySettings:
    """Fill in `settings` from a robot's metadata.

    The horizon and the number of executed steps are always taken from the metadata, prompt words and cameras only if
    `settings` leaves them empty.

    Args:
        available: Cameras of the dataset. As in LeRobot, the metadata's cameras are used only if all are available.

    Raises:
        ConfigurationError: more steps are executed than predicted.
    """
    chunk = robot.action_horizon or settings.chunk_size
    steps = robot.n_action_steps or settings.n_action_steps
    if steps > chunk:
        raise ConfigurationError(
            f"n_action_steps is {steps}, but only {chunk} actions are predicted",
            code="chunk_too_short",
            where=f"settings: chunk_size {settings.chunk_size}, n_action_steps {settings.n_action_steps}; tag: "
            f"action_horizon {robot.action_horizon}, n_action_steps {robot.n_action_steps}",
        )
    cameras = settings.image_keys or robot.camera_keys
    if available and not settings.image_keys and not (cameras and set(cameras) <= set(available)):
        if cameras:
            log.warning("the dataset lacks cameras of norm_tag (%s), using the dataset's: %s", cameras, available)
        cameras = tuple(available)
    return settings.model_copy(
        update={
            "chunk_size": chunk,
            "n_action_steps": steps,
            "setup_type": settings.setup_type or robot.setup_type,
            "control_mode": settings.control_mode or robot.control_mode,
            "image_keys": tuple(cameras),
        }
    )


def training_robot(settings: RobotPolicySettings, tagged: RobotMetadata, dataset: RobotMetadata) -> RobotMetadata:
    """Return the metadata for training with a norm_tag.

    With the semantics "head" it is `tagged`; earlier versions replace its statistics by the dataset's.
    """
    if settings.semantics == "head":
        return tagged
    return tagged.model_copy(update={"action_stats": dataset.action_stats, "state_stats": dataset.state_stats})


def _feature_stats(
    key: str, statistics: Mapping[str, Mapping[str, Any]], features: Mapping[str, Feature]
) -> FeatureNormStats:
    """Return the statistics of the feature `key`, with quantiles widened by `FeatureNormStats.widened`.

    Dimensions whose quantiles are widened, or are much closer together than min and max, are logged as warnings.
    """
    if key not in statistics or key not in features:
        raise DataError(
            f"the dataset has no feature {key!r}, or no statistics for it",
            code="statistics_missing",
            where=f"features: {', '.join(features)}; statistics: {', '.join(statistics)}",
            remedy="run quantile-stats on the dataset, with the feature in statistics.features or without that setting",
        )
    entry = {name: value for name, value in statistics[key].items() if name in (*_ARRAYS, "count")}
    try:
        stats = FeatureNormStats(**entry, names=dimension_names(features[key]))
    except ValidationError as error:
        raise DataError(
            _first(error),
            code="invalid_statistics",
            where=f"statistics of {key!r}, whose shape is {list(features[key].shape)}",
            remedy="state and action need one list of numbers for each frame",
        ) from error
    if rare := np.flatnonzero(stats.rarely_moving()).tolist():
        log.warning("dimensions %s of %s move rarely: q01 and q99 are replaced by min and max", rare, key)
    if narrow := np.flatnonzero(stats.narrow(RARE_GRIPPER) & ~stats.rarely_moving()).tolist():
        log.warning(
            "q01 and q99 of dimensions %s of %s are much closer together than min and max; values outside are clipped. "
            "This is right for outliers. A gripper is not clipped if its dimension's name contains gripper",
            narrow,
            key,
        )
    return stats.widened()


def dimension_names(feature: Feature) -> tuple[str, ...] | None:
    """Return the names of a feature's dimensions, which LeRobot writes as a list or as {"motors": [...]}.

    Example:
        >>> dimension_names(Feature(dtype="float32", shape=(2,), names={"motors": ["pan", "gripper"]}))
        ('pan', 'gripper')
    """
    groups = feature.names.values() if isinstance(feature.names, Mapping) else [feature.names or ()]
    return (
        tuple(str(name) for group in groups for name in (group if isinstance(group, list | tuple) else [group])) or None
    )


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']} (given {problem['input']!r:.80})"


# --- Normalization between a dataset's units and [-1, 1] ---

_TINY, _SMALL = np.float32(1e-8), np.float32(1e-6)
_NEEDED = {"quantiles": ("q01", "q99"), "mean_std": ("mean", "std"), "identity": ()}


@dataclass(frozen=True)
class Normalizer:
    """Normalizes one feature. All is computed in float32, to which the statistics are rounded first.

    quantiles: y = 2 (x - q01) / (q99 - q01) - 1, clipped to [-1, 1]. A span of 0 counts as 1e-8, so that a dimension
    that never moves is restored to its constant.
    mean_std: y = (x - mean) / (std + 1e-8), not clipped. The inverse multiplies by std without the 1e-8, as in the
    released code, unless std is below 1e-6.
    identity: y = x, clipped to [-1, 1].
    Dimensions with `mask` False are not changed and must be in [-1, 1].

    Example:
        >>> stats = FeatureNormStats(min=(0, 0), max=(4, 1), q01=(0, 0), q99=(4, 1), names=("x", "gripper"))
        >>> normalizer = Normalizer.build("action", stats, "quantiles", normalize_gripper=False)
        >>> normalizer.normalize([1, 1]).tolist()
        [-0.5, 1.0]
        >>> normalizer.restore([-0.5, 1]).tolist()
        [1.0, 1.0]
    """

    feature: str
    mode: Normalization
    names: tuple[str, ...]
    mask: Flags
    first: Floats
    second: Floats

    @classmethod
    def build(cls, feature: str, stats: FeatureNormStats, mode: Normalization, normalize_gripper: bool) -> Normalizer:
        """Make the normalizer of a feature and check its statistics.

        Raises:
            ConfigurationError: the statistics lack numbers that the mode needs, or contradict each other; an action in
                the data has no normalized value; no name tells which dimension is the gripper; or a gripper that is
                not normalized has values outside [-1, 1].
        """
        width = stats.dimensions
        needed = {key: getattr(stats, key) for key in _NEEDED[mode]}
        missing = [key for key, values in needed.items() if values is None]
        if missing:
            raise ConfigurationError(
                f"normalization by {mode} needs {' and '.join(missing)}, which the statistics lack",
                code="statistics_incomplete",
                where=f"statistics of {feature}",
                remedy="run quantile-stats on the dataset, or choose another normalization",
            )
        with np.errstate(over="ignore"):
            first, second = (np.array(values, np.float32) for values in needed.values() or [[0.0] * width] * 2)
        mask = gripper_mask(feature, stats, normalize_gripper)
        names = stats.names if stats.names is not None and len(stats.names) == width else tuple(map(str, range(width)))
        normalizer = cls(feature, mode, names, mask, first, second)
        normalizer._check(stats)
        for bound in (stats.min, stats.max):
            if bound is not None and (problem := normalizer._passed_outside(np.array(bound, np.float32))):
                raise ConfigurationError(
                    f"{problem}, and this dimension is not normalized",
                    code="gripper_range_exceeded",
                    where=f"statistics of {feature}",
                    remedy="set normalize_gripper = true",
                )
        return normalizer

    @property
    def dimensions(self) -> int:
        """Number of dimensions of the feature."""
        return len(self.mask)

    def normalize(self, values: ArrayLike, where: str = "") -> Floats:
        """Normalize values (..., dimensions) in the dataset's units.

        Raises:
            DataError: the values have another number of dimensions, or a dimension that is not normalized has a value
                outside [-1, 1].
        """
        x = np.asarray(values, np.float32)
        if x.ndim == 0 or x.shape[-1] != self.dimensions:
            raise DataError(
                f"{self.feature} has the shape {x.shape}, but its statistics have {self.dimensions} dimensions",
                code="dimensions_mismatch",
                where=where,
            )
        if problem := self._passed_outside(x):
            raise DataError(
                problem,
                code="gripper_out_of_range",
                where=where,
                remedy="set normalize_gripper = true, or correct the frame",
            )
        if self.mode == "mean_std":
            y = (x - self.first) / (self.second + _TINY)
        else:
            y = np.clip(2 * (x - self.first) / self._span - 1 if self.mode == "quantiles" else x, -1, 1)
        return np.where(self.mask, y, x).astype(np.float32)

    def restore(self, values: ArrayLike) -> Floats:
        """Invert `normalize` for values (..., dimensions).

        Values are clipped to [-1, 1] first in modes that clip, and always in dimensions that are not normalized.
        """
        y = np.asarray(values, np.float32)
        if self.mode == "mean_std":
            small = (self.second > 0) & (self.second < _SMALL)
            std = np.where(small, self.second + _TINY, self.second)
            return np.where(self.mask, y * std + self.first, np.clip(y, -1, 1)).astype(np.float32)
        y = np.clip(y, -1, 1)
        x = (y + 1) * self._span / 2 + self.first if self.mode == "quantiles" else y
        return np.where(self.mask, x, y).astype(np.float32)

    @property
    def _span(self) -> Floats:
        span = self.second - self.first
        return np.where(span == 0, _TINY, span)

    def _check(self, stats: FeatureNormStats) -> None:
        """Raise ConfigurationError if numbers of `stats` contradict each other.

        The same error is raised if actions in the data cannot be restored from normalized values.
        """
        low, high = np.zeros((2, self.dimensions))
        if stats.min is not None and stats.max is not None:
            low, high = np.array(stats.min), np.array(stats.max)
        spread = high - low
        with np.errstate(over="ignore", invalid="ignore"):
            span = self.second if self.mode == "mean_std" else self.second - self.first
        lost = {
            "quantiles": stats.rarely_moving(),
            "mean_std": span < 1e-6 * spread,  # of n values, std is at least (max - min) / sqrt(2 n)
            "identity": np.maximum(-low, high) > 1 + 1e-3,
        }[self.mode]
        problems = {
            "are not finite in float32": ~(np.isfinite(self.first) & np.isfinite(span)),
            "have max below min": spread < 0,
            "have a negative std" if self.mode == "mean_std" else "have q99 below q01": span < 0,
            "cannot be inverted: no prediction reaches min and max": lost & (self.feature == "action"),
        }
        for problem, places in problems.items():
            if (places & self.mask).any():
                at = int(np.argmax(places & self.mask))
                numbers = {name: getattr(stats, name) for name in ("min", "max", *_NEEDED[self.mode])}
                raise ConfigurationError(
                    f"statistics of {self.feature} {self.names[at]!r} {problem}",
                    code="unusable_statistics",
                    where=", ".join(f"{name} {each[at]:.9g}" for name, each in numbers.items() if each is not None),
                    remedy="use the dataset's statistics of quantile-stats, whose quantiles of a dimension that moves "
                    "rarely are replaced by min and max, or choose another normalization",
                )

    def _passed_outside(self, values: Floats) -> str:
        """Describe the first value outside [-1, 1] in a dimension that is not normalized; return "" without one."""
        outside = np.argwhere((np.abs(values) > 1) & ~self.mask)
        if not len(outside):
            return ""
        place = tuple(outside[0])
        frame = f" at step {place[-2]}" if len(place) > 1 else ""
        return f"{self.feature} {self.names[place[-1]]!r} is {values[place]:g}{frame}, outside [-1, 1]"


def gripper_mask(feature: str, stats: FeatureNormStats, normalize_gripper: bool) -> Flags:
    """Return a mask (dimensions,) that is True for dimensions to normalize.

    With `normalize_gripper`, all dimensions are True. Otherwise the mask of the statistics is returned. If they have
    no mask, dimensions with "gripper" in their name are False.

    Raises:
        ConfigurationError: the gripper should not be normalized, but not every dimension has a name.
    """
    width = stats.dimensions
    if normalize_gripper:
        return np.ones(width, bool)
    if stats.mask is not None:
        return np.array(stats.mask, bool)
    if stats.names is None or len(stats.names) != width:
        raise ConfigurationError(
            f"{feature} has {width} dimensions but {len(stats.names or ())} names, so the gripper is unknown",
            code="gripper_unnamed",
            where="the dataset's info.json, features",
            remedy="name every dimension, or set normalize_gripper = true",
        )
    return np.array(["gripper" not in name.lower() for name in stats.names])
