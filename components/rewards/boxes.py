"""Rewards for grounding: boxes and points in an image."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

from pydantic import Field

from armature.components.rewards.reward import (
    BadAnswer,
    ExtractingSettings,
    Reward,
    RewardInput,
    extracted,
    folded,
    last_match,
)

Box = tuple[float, float, float, float]
"""A box in an image: its left, top, right and bottom coordinates."""

_N = r"\s{0,20}([-+]?(?:\d{1,9}(?:\.\d{0,12})?|\.\d{1,12}))\s{0,20}"
_BOXES = re.compile(rf"[\[(]{_N},{_N}(?:,|[\])]\s?,?\s?[\[(]){_N},{_N}[\])]")
_PAIRS = re.compile(rf"[\[(]{_N},{_N}[\])]")
_MOLMO = re.compile(rf"<point\s[^<>]{{0,400}}?\bx\s?=\s?[\"']{_N}[\"']\s{{1,20}}y\s?=\s?[\"']{_N}[\"']")
_UNITS = {"fraction": 1.0, "percent": 100.0, "thousandths": 1000.0}


class BoxSettings(ExtractingSettings):
    """The formats of the coordinates in answers and completions."""

    answer_form: Literal["xyxy", "xywh"] = "xyxy"
    """Format of a box in the answer: left, top, right, bottom; or left, top, width, height."""
    units: Literal["answer", "fraction", "percent", "thousandths"] = "answer"
    """Units of the completion's coordinates: the units of the answer, or parts of the image's width and height (Molmo:
    percent; Qwen2-VL: thousandths)."""
    width: str = "width"
    """Column with the image's width in the answer's units; needed unless units is answer."""
    height: str = "height"
    """Column with the image's height in the answer's units; needed unless units is answer."""


BoxSettingsT = TypeVar("BoxSettingsT", bound=BoxSettings)


class BoxReward(Reward[BoxSettingsT]):
    """A reward whose answers are boxes."""

    @staticmethod
    def columns(settings: BoxSettings) -> tuple[str, ...]:
        return () if settings.units == "answer" else (settings.width, settings.height)

    def check(self, answer: Any) -> None:
        _boxes(answer, self._settings.answer_form)


class BoxIoUSettings(BoxSettings):
    """The reward is the intersection over union (IoU) of two boxes, or 1 if the IoU reaches a threshold."""

    threshold: float | None = Field(None, gt=0, le=1)
    """The reward is 1 if the IoU is at least this value, else 0; unset: the reward is the IoU itself."""


class BoxIoU(BoxReward[BoxIoUSettings]):
    """Grade the last box in the completion: [x1, y1, x2, y2], also in JSON such as {"bbox_2d": [...]}, or
    (x1,y1),(x2,y2).

    The answer is a box or a list of boxes, of which the one with the largest IoU counts.
    """

    Settings: ClassVar = BoxIoUSettings

    def grade(self, inputs: RewardInput) -> float:
        boxes = _boxes(inputs.answer, self._settings.answer_form)
        coordinates = _read_coordinates(inputs, self._settings, read_box)
        if coordinates is None:
            return 0.0
        left, top, right, bottom = coordinates
        best = max(intersection_over_union((left, top, right, bottom), box) for box in boxes)
        return best if self._settings.threshold is None else float(best >= self._settings.threshold)


class PointInBoxSettings(BoxSettings):
    """The reward is 1 if the point lies in the box or on its edges, else 0."""


class PointInBox(BoxReward[PointInBoxSettings]):
    """Grade the last point in the completion: (x, y), [x, y], also in JSON such as {"point_2d": [x, y]}, or
    <point x="..." y="...">.

    The answer is a box or a list of boxes, any of which may contain the point.
    """

    Settings: ClassVar = PointInBoxSettings

    def grade(self, inputs: RewardInput) -> float:
        boxes = _boxes(inputs.answer, self._settings.answer_form)
        point = _read_coordinates(inputs, self._settings, read_point)
        if point is None:
            return 0.0
        x, y = point
        return float(any(left <= x <= right and top <= y <= bottom for left, top, right, bottom in boxes))


def read_box(text: str) -> Sequence[float] | None:
    """Return the four coordinates of the last box in `text`, or None if it has no box. Takes linear time.

    Example:
        >>> read_box('{"bbox_2d": [10, 20, 30.5, 40]}')
        [10.0, 20.0, 30.5, 40.0]
    """
    match = last_match(_BOXES, folded(text))
    return None if match is None else [float(each) for each in match.groups()]


def read_point(text: str) -> Sequence[float] | None:
    """Return x and y of the last point in `text`, or None if it has no point. Takes linear time."""
    text = folded(text)
    matches = [match for pattern in (_PAIRS, _MOLMO) if (match := last_match(pattern, text))]
    return [float(each) for each in max(matches, key=re.Match.end).groups()] if matches else None


def intersection_over_union(one: Box, other: Box) -> float:
    """Return the IoU of two boxes, from 0 to 1; 0 if a box has no area."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    areas = [max(0.0, box[2] - box[0]) * max(0.0, box[3] - box[1]) for box in (one, other)]
    common = max(0.0, width) * max(0.0, height)
    return common / (sum(areas) - common) if min(areas) > 0 else 0.0


def _read_coordinates(
    inputs: RewardInput, settings: BoxSettings, read: Callable[[str], Sequence[float] | None]
) -> Sequence[float] | None:
    """Return the coordinates that `read` reads from the completion, converted to the answer's units.

    Return None if the completion has no coordinates.
    """
    scale = _scale(inputs.row, settings)
    text = extracted(inputs.completion, settings.extract)
    coordinates = None if text is None else read(text)
    return None if coordinates is None else [value * scale[index % 2] for index, value in enumerate(coordinates)]


def _scale(row: Mapping[str, Any], settings: BoxSettings) -> tuple[float, float]:
    if settings.units == "answer":
        return 1.0, 1.0
    sizes = []
    for column in (settings.width, settings.height):
        value: Any = row.get(column)
        if not _is_number(value) or value <= 0:
            raise BadAnswer(
                f"column {column!r} is {value!r:.100}, not the size of an image, which {settings.units} need"
            )
        sizes.append(value / _UNITS[settings.units])
    return sizes[0], sizes[1]


def _boxes(answer: Any, form: str) -> list[Box]:
    several = isinstance(answer, list | tuple) and len(answer) > 0 and isinstance(answer[0], list | tuple)
    boxes = []
    for box in answer if several else [answer]:
        if not isinstance(box, list | tuple) or len(box) != 4 or not all(map(_is_number, box)):
            raise BadAnswer(f"{answer!r:.200} is neither a box of four numbers nor a list of boxes")
        left, top, right, bottom = map(float, box)
        if form == "xywh":
            right, bottom = left + right, top + bottom
        if right <= left or bottom <= top:
            raise BadAnswer(f"the box {box!r:.200} is empty, read as {form}")
        boxes.append((left, top, right, bottom))
    return boxes


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15 and math.isfinite(value)
