"""norm_stats.json: what a checkpoint knows of each robot, by tag. The same form holds what a dataset knows of its own.

A tag's entry has the statistics of state and action, and the cameras, words and horizon it was trained with.
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
from armature.components.contracts.files import read_bytes
from armature.components.contracts.metrics import read_finite
from armature.components.robots.datasets.lerobot.layout import Feature
from armature.components.robots.policies.molmoact2.processing.batch import Flags, Floats
from armature.components.robots.policies.settings import Normalization, RobotPolicySettings

log = logging.getLogger(__name__)

FORMAT = "molmoact2_norm_stats.v1"
STATE, ACTION = "observation.state", "action"
NORM_MODES = {"quantiles": "q01_q99", "mean_std": "mean_std", "identity": "identity"}
_ARRAYS = ("min", "max", "mean", "std", "q01", "q10", "q50", "q90", "q99")

RARE, RARE_GRIPPER = 1e-5, 1e-2
"""Shares of max - min below which q99 - q01 says that a dimension moves rarely. Outliers of other dimensions make small
shares too, and are to be clipped; one that is named a gripper has none, but noise while it rests.
"""

Numbers = tuple[FiniteFloat, ...]
Words = Annotated[str, BeforeValidator(lambda value: "" if value is None else value)]


class FeatureNormStats(BaseModel):
    """Of one feature, a number per dimension. `mask` is False where a dimension is passed on as it is."""

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
            raise ValueError(f"statistics need one number per dimension, given {widths or 'none at all'}")
        return self

    @property
    def dimensions(self) -> int:
        return next(len(value) for name in _ARRAYS if (value := getattr(self, name)) is not None)

    @property
    def _grippers(self) -> NDArray[np.bool_]:
        names = self.names if self.names is not None and len(self.names) == self.dimensions else ()
        return np.array(["gripper" in name.lower() for name in names] or [False] * self.dimensions)

    def narrow(self, share: float | NDArray[np.float64]) -> NDArray[np.bool_]:
        """(dimensions,): where min and max differ, and q99 - q01 is 0 or less than this `share` of max - min.

        Of grippers q90 - q10 counts where it is known, as q99 may lie anywhere between a rest and a few moves. A tenth
        of max - min has to be outside q01 and q99.
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
        """(dimensions,): where values are so much alike that their quantiles hide the others.

        No value in [-1, 1] stands for what is outside the quantiles: a gripper could never close. So it is where a
        dimension is `narrow`, or has two values of which one is clipped.
        """
        rare = self.narrow(np.where(self._grippers, RARE_GRIPPER, RARE))
        if None in (self.q01, self.q99, self.min, self.max, self.mean, self.std):
            return rare
        q01, q99, low, high, mean, std = (
            np.array(each, np.float64) for each in (self.q01, self.q99, self.min, self.max, self.mean, self.std)
        )
        # Bhatia and Davis (2000): a variance is at most (max - mean) (mean - min), which it is of two values alone.
        largest = (high - mean) * (mean - low)
        two_values = (high > low) & (np.abs(std * std - largest) <= 1e-3 * np.abs(largest))
        clipped = np.maximum(high - q99, q01 - low) > 1e-3 * (high - low)
        found: NDArray[np.bool_] = rare | (two_values & clipped)
        return found

    def widened(self) -> FeatureNormStats:
        """With min and max in place of q01 and q99 of dimensions that move rarely."""
        ends = {name: list(getattr(self, name) or ()) for name in ("q01", "q99", "min", "max")}
        for place in np.flatnonzero(self.rarely_moving()):
            ends["q01"][place], ends["q99"][place] = ends["min"][place], ends["max"][place]
        changed = {name: tuple(ends[name]) for name in ("q01", "q99") if ends[name]}
        return self.model_copy(update=changed)


class RobotMetadata(BaseModel):
    """One robot, or one dataset. Fields that are not known here are kept."""

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
    """The file."""

    model_config = ConfigDict(extra="allow", frozen=True)

    format: Literal["molmoact2_norm_stats.v1"]
    norm_mode: str
    metadata_by_tag: dict[str, RobotMetadata]

    @classmethod
    def load(cls, path: Path) -> NormStats:
        """
        Raises:
            DataError: no such file, or not of this format.
        """
        try:
            return cls.model_validate(read_finite(read_bytes(path)))
        except FileNotFoundError as error:
            raise DataError(
                "the checkpoint has no statistics",
                code="checkpoint_file_missing",
                where=str(path),
                remedy="give a checkpoint with norm_stats.json",
            ) from error
        except ValidationError as error:
            raise DataError(_first(error), code="invalid_statistics", where=str(path)) from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"not JSON of finite numbers: {error}", code="invalid_json", where=str(path)) from error

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.model_dump(mode="json", exclude_unset=True), indent=2) + "\n")

    def select(self, tag: str) -> RobotMetadata:
        """
        Raises:
            ConfigurationError: there is no such tag.
        """
        if tag not in self.metadata_by_tag:
            raise ConfigurationError(
                f"no statistics for norm_tag {tag!r}",
                code="unknown_norm_tag",
                where="norm_stats.json",
                remedy=f"use one of {', '.join(sorted(self.metadata_by_tag)) or 'none: the file is empty'}",
            )
        return self.metadata_by_tag[tag]


def norm_stats(robots: Mapping[str, RobotMetadata], settings: RobotPolicySettings) -> NormStats:
    """The file for these tags; its mode is that of the actions."""
    mode = NORM_MODES[settings.action_normalization]
    return NormStats(format=FORMAT, norm_mode=mode, metadata_by_tag=dict(robots))


def robot_metadata(
    statistics: Mapping[str, Mapping[str, Any]], features: Mapping[str, Feature], settings: RobotPolicySettings
) -> RobotMetadata:
    """What a dataset knows of its robot.

    Args:
        statistics: LeRobot's stats.json.
        features: Of info.json. The names of a feature's dimensions say which is the gripper.

    Quantiles of dimensions that move rarely are widened.

    Raises:
        DataError: state or action are not there, or their statistics cannot be.
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
    """`settings` as a tag completes them: its horizon and steps count, its words and cameras fill what is empty.

    Args:
        available: Cameras of the dataset. The tag's are used only if all of them are there, as LeRobot does.

    Raises:
        ConfigurationError: more steps are to be carried out than are predicted.
    """
    chunk = robot.action_horizon or settings.chunk_size
    steps = robot.n_action_steps or settings.n_action_steps
    if steps > chunk:
        raise ConfigurationError(
            f"n_action_steps {steps} is more than the {chunk} actions that are predicted",
            code="chunk_too_short",
            where=f"settings: chunk_size {settings.chunk_size}, n_action_steps {settings.n_action_steps}; tag: "
            f"action_horizon {robot.action_horizon}, n_action_steps {robot.n_action_steps}",
        )
    cameras = settings.image_keys or robot.camera_keys
    if available and not settings.image_keys and not (cameras and set(cameras) <= set(available)):
        if cameras:
            log.warning("the tag's cameras %s are not in the dataset, its own are used: %s", cameras, available)
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
    """Whose statistics a policy with a tag is trained with: the tag's (head), else the dataset's."""
    if settings.semantics == "head":
        return tagged
    return tagged.model_copy(update={"action_stats": dataset.action_stats, "state_stats": dataset.state_stats})


def _feature_stats(
    key: str, statistics: Mapping[str, Mapping[str, Any]], features: Mapping[str, Feature]
) -> FeatureNormStats:
    if key not in statistics or key not in features:
        raise DataError(
            f"the dataset has no {key!r}, or no statistics of it",
            code="statistics_missing",
            where=f"features: {', '.join(features)}; statistics: {', '.join(statistics)}",
            remedy="run quantile-stats on the dataset",
        )
    entry = {name: value for name, value in statistics[key].items() if name in (*_ARRAYS, "count")}
    try:
        stats = FeatureNormStats(**entry, names=_names(features[key].names))
    except ValidationError as error:
        raise DataError(_first(error), code="invalid_statistics", where=f"statistics of {key!r}") from error
    if rare := np.flatnonzero(stats.rarely_moving()).tolist():
        log.warning("dimensions %s of %s move rarely: their q01 and q99 are widened to min and max", rare, key)
    if narrow := np.flatnonzero(stats.narrow(RARE_GRIPPER) & ~stats.rarely_moving()).tolist():
        log.warning(
            "q01 and q99 of dimensions %s of %s are much nearer than min and max, and what is outside is clipped: "
            "right for outliers; a dimension that moves rarely is widened if its name says gripper",
            narrow,
            key,
        )
    return stats.widened()


def _names(names: Any) -> tuple[str, ...] | None:
    """LeRobot writes a list, or lists by kind: {"motors": [...]}."""
    if isinstance(names, Mapping):
        return tuple(str(name) for group in names.values() for name in ([group] if isinstance(group, str) else group))
    return tuple(str(name) for name in names) if names else None


def _first(error: ValidationError) -> str:
    problem = error.errors()[0]
    return f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']} (given {problem['input']!r:.80})"


# Between a dataset's units and the range that the policy works in.

_TINY, _SMALL = np.float32(1e-8), np.float32(1e-6)
_NEEDED = {"quantiles": ("q01", "q99"), "mean_std": ("mean", "std"), "identity": ()}


@dataclass(frozen=True)
class Normalizer:
    """One feature, in float32 throughout, the statistics being rounded to it first.

    quantiles: y = 2 (x - q01) / (q99 - q01) - 1, clipped to [-1, 1]; a span of 0 counts as 1e-8, so that a dimension
    that never moves is restored to its constant.
    mean_std: y = (x - mean) / (std + 1e-8), not clipped; restored without the 1e-8, which is as released, but where
    std is below 1e-6. identity: y = x, clipped to [-1, 1].
    Dimensions that `mask` leaves out are passed on as they are and must lie in [-1, 1].
    """

    feature: str
    mode: Normalization
    names: tuple[str, ...]
    mask: Flags
    first: Floats
    second: Floats

    @classmethod
    def build(cls, feature: str, stats: FeatureNormStats, mode: Normalization, normalize_gripper: bool) -> Normalizer:
        """
        Raises:
            ConfigurationError: the statistics lack what the mode needs, or cannot be; no value of the policy would
                reach an action that the data has; nothing says which dimension is the gripper; or a gripper that is
                passed on has values outside [-1, 1].
        """
        width = stats.dimensions
        needed = {key: getattr(stats, key) for key in _NEEDED[mode]}
        missing = [key for key, values in needed.items() if values is None]
        if missing:
            raise ConfigurationError(
                f"normalization by {mode} needs {' and '.join(missing)}",
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
                    f"{problem} and would not be normalized",
                    code="gripper_range_exceeded",
                    where=f"statistics of {feature}",
                    remedy="set normalize_gripper = true",
                )
        return normalizer

    @property
    def dimensions(self) -> int:
        return len(self.mask)

    def normalize(self, values: ArrayLike, where: str = "") -> Floats:
        """(..., dimensions) of the dataset's units.

        Raises:
            DataError: another number of dimensions, or a passed-on value outside [-1, 1].
        """
        x = np.asarray(values, np.float32)
        if x.ndim == 0 or x.shape[-1] != self.dimensions:
            raise DataError(
                f"{self.feature} has the shape {x.shape}, its statistics have {self.dimensions} dimensions",
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
        """The inverse, (..., dimensions); what was clipped is clipped first, passed-on dimensions too."""
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
        """
        Raises:
            ConfigurationError: see `build`.
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
            "cannot be inverted: no answer of the policy reaches min and max": lost & (self.feature == "action"),
        }
        for problem, places in problems.items():
            if (places & self.mask).any():
                at = int(np.argmax(places & self.mask))
                numbers = {name: getattr(stats, name) for name in ("min", "max", *_NEEDED[self.mode])}
                raise ConfigurationError(
                    f"statistics of {self.feature} {self.names[at]!r} {problem}",
                    code="unusable_statistics",
                    where=", ".join(f"{name} {each[at]:.9g}" for name, each in numbers.items() if each is not None),
                    remedy="train with the dataset's own statistics of quantile-stats, where those of a dimension that "
                    "moves rarely are widened to min and max, or choose another normalization",
                )

    def _passed_outside(self, values: Floats) -> str:
        """What is wrong with the dimensions that are passed on, or nothing."""
        outside = np.argwhere((np.abs(values) > 1) & ~self.mask)
        if not len(outside):
            return ""
        place = tuple(outside[0])
        frame = f" at step {place[-2]}" if len(place) > 1 else ""
        return f"{self.feature} {self.names[place[-1]]!r} is {values[place]:g}{frame}, outside [-1, 1]"


def gripper_mask(feature: str, stats: FeatureNormStats, normalize_gripper: bool) -> Flags:
    """True where a dimension is normalized: all, or as the statistics say, or all but those named a gripper.

    Raises:
        ConfigurationError: the gripper is not to be normalized and there is no name for each dimension.
    """
    width = stats.dimensions
    if normalize_gripper:
        return np.ones(width, bool)
    if stats.mask is not None:
        return np.array(stats.mask, bool)
    if stats.names is None or len(stats.names) != width:
        raise ConfigurationError(
            f"{feature} has {width} dimensions and {len(stats.names or ())} names: which is the gripper?",
            code="gripper_unnamed",
            where="the dataset's info.json, features",
            remedy="name every dimension, or set normalize_gripper = true",
        )
    return np.array(["gripper" not in name.lower() for name in stats.names])
