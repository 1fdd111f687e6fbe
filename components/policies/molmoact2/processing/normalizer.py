"""Between a dataset's units and the range that the policy works in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.policies.molmoact2.processing.batch import Flags, Floats
from armature.components.policies.molmoact2.processing.norm_stats import FeatureNormStats
from armature.components.policies.settings import Normalization

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
