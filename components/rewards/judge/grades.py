"""What a judge is asked, and the grade in what it replies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from armature.components.contracts.failures import RolloutFailed
from armature.components.contracts.secret_values import blanked
from armature.components.contracts.value_text import value_text
from armature.components.rewards.judge.settings import PLACE, JudgeSettings
from armature.components.rewards.number import read_number
from armature.components.rewards.reward import BadAnswer, RewardInput

_OF = re.compile(r"(?<=\d)\W{0,4}/\W{0,4}\d+(?:\.\d+)?")
"""In 7/10, what the grade is out of."""
_WORD = re.compile(r"[^\w]{0,20}(\w[\w-]{0,63})")


def question(given: RewardInput, completion: str, template: str) -> str:
    """The template with its places filled; places in what is filled in are text.

    Raises:
        BadAnswer: the row lacks a column that the template names.
    """

    def value(place: re.Match[str]) -> str:
        name = place.group(1)
        if name == "completion":
            return completion
        found = given.answer if name == "answer" else given.row.get(name)
        if found is None:
            raise BadAnswer(f"the template names {name!r}, which the row lacks")
        return json.dumps(found, ensure_ascii=False) if isinstance(found, list | dict) else value_text(found)

    return PLACE.sub(value, template)


def grade_in(reply: str, settings: JudgeSettings) -> float:
    """From 0 for the worst grade to 1 for the best.

    Raises:
        RolloutFailed: `judge_unreadable`: there is none.
    """
    said: Any = _value_of(reply, settings.json_key) if settings.json_key else _following(reply, settings.after)
    number = _number(said, settings)
    if number is None or not settings.is_grade(number):
        raise RolloutFailed(
            "judge_unreadable", f"no grade from {settings.worst:g} to {settings.best:g} in {blanked(reply)!r:.1000}"
        )
    return (number - settings.worst) / (settings.best - settings.worst)


def _number(said: Any, settings: JudgeSettings) -> float | None:
    if isinstance(said, bool):
        said = str(said)
    if settings.verdicts and isinstance(said, str):
        word = _WORD.match(said)
        verdicts = {name.casefold(): grade for name, grade in settings.verdicts.items()}
        return verdicts.get(word.group(1).casefold()) if word else None
    if isinstance(said, int | float):
        return float(said) if abs(said) < 1e15 else None
    return read_number(_OF.sub("", said[:1000]), "first", 0.01) if isinstance(said, str) else None


def _following(reply: str, marker: str) -> str | None:
    _, found, rest = reply.rpartition(marker) if marker else ("", "all", reply)
    return rest if found else None


def _value_of(reply: str, key: str) -> Any:
    found = None
    for document in _objects(reply):
        found = document.get(key, found)
    return found


def _objects(text: str) -> Iterator[dict[str, Any]]:
    """The JSON objects in a text, outermost ones. At most 100 places are tried."""
    decoder, start = json.JSONDecoder(), text.find("{")
    for _ in range(100):
        if start < 0:
            return
        try:
            document, end = decoder.raw_decode(text, start)
            yield document
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
