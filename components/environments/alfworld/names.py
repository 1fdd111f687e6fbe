"""What things are called: `apple 1`, `fridge 1`, and the same name in the text game and in AI2-THOR."""

from __future__ import annotations

import re
from collections import defaultdict

_DECLARED = re.compile(r"([^\s()]+) - (?:object|receptacle)\b")
_ESCAPED = {"_bar_": "|", "_minus_": "-", "_plus_": "+", "_dot_": ".", "_comma_": ","}


def kind_of(object_id: str) -> str:
    """The kind that a name begins with: `fridge`, and `sinkbasin` where the id ends in it."""
    kind = object_id.partition("|")[0].lower()
    return kind + "basin" if "basin" in object_id.lower() and not kind.endswith("basin") else kind


def names_of(problem: str) -> dict[str, str]:
    """The name of each object and receptacle that the PDDL `problem` declares, by its id in lower case.

    The numbers are the text engine's: of one kind, the first id in its alphabetical order (of PDDL names) has the
    highest.
    """
    declared = problem.partition("(:objects")[2].partition("(:init")[0].lower()
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in sorted(set(_DECLARED.findall(declared))):
        object_id = name
        for written, character in _ESCAPED.items():
            object_id = object_id.replace(written, character)
        kinds[kind_of(object_id)].append(object_id)
    return {
        object_id: f"{kind} {len(ids) - position}"
        for kind, ids in kinds.items()
        for position, object_id in enumerate(ids)
    }
