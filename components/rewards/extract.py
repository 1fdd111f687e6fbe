"""The part of a completion that is graded."""

from __future__ import annotations

import re
import unicodedata
from collections import deque

from pydantic import Field

from armature.components.rewards.settings import NamedReward

EXTRACT = r"^(all|boxed|</?[A-Za-z_][\w.-]{0,63}>)$"
"""What `extracted` takes."""
UNSPACED = "\u3040-\u30ff\u3400-\u9fff\uac00-\ud7a3"
"""Japanese, Chinese and Korean, which put no space before a letter or a number."""
_SCRIPT_CHANGE = re.compile(rf"(?<=[{UNSPACED}])(?=[A-Za-z0-9])|(?<=[A-Za-z0-9])(?=[{UNSPACED}])")
_APOSTROPHES = str.maketrans("\u2018\u2019\u02bc", "'''")
_INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\ufeff]")
_BRACES = re.compile(r"\\(?:boxed|fbox)\s{0,8}\{|\\.|[{}]", re.DOTALL)


class ExtractingSettings(NamedReward):
    """Of rewards that may look at a part of the completion alone."""

    extract: str = Field(
        "all",
        pattern=EXTRACT,
        description="What of the completion is graded: all; boxed: the last \\boxed{...}; <answer>: what is between "
        "the last such tag and its end; </think>: what follows the last of it. Where that is missing, the reward is 0.",
    )


def extracted(completion: str, extract: str) -> str | None:
    """The part that `extract` names, see `ExtractingSettings`; None if it is missing. Takes linear time."""
    if extract == "all":
        return completion
    if extract == "boxed":
        return last_boxed(completion)
    if extract.startswith("</"):
        _, found, rest = completion.rpartition(extract)
        return rest.strip() if found else None
    before, found, _ = completion.rpartition(f"</{extract[1:]}")
    _, opened, inside = before.rpartition(extract)
    return inside.strip() if found and opened else None


def folded(text: str) -> str:
    """Return the text in one form (NFKC), without invisible characters, with spaces where its script changes."""
    text = _INVISIBLE.sub("", unicodedata.normalize("NFKC", text)).translate(_APOSTROPHES)
    return _SCRIPT_CHANGE.sub(" ", text)


def last_boxed(completion: str) -> str | None:
    r"""What is in the \boxed{...}, or \fbox{...}, that is closed last; escaped braces are text, others are counted."""
    opened: list[int | None] = []
    found = None
    for match in _BRACES.finditer(completion):
        token = match.group()
        if token == "}" and opened:
            start = opened.pop()
            if start is not None:
                found = start, match.start()
        elif token.startswith(("\\boxed", "\\fbox")):
            opened.append(match.end())
        elif token == "{":
            opened.append(None)
    return completion[slice(*found)].strip() if found else None


def last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    """The last match of `pattern`, None if there is none."""
    last = deque(pattern.finditer(text), maxlen=1)
    return last[0] if last else None
