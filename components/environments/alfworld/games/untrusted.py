"""What a game file or a task may hand to the engine: a PDDL problem of known shape, and a plain sentence."""

from __future__ import annotations

import re

from armature.components.contracts.errors import DataError

LONGEST_PROBLEM = 2**20
LONGEST_NAME = 150
"""fast-downward's library copies an operator, a name and up to six arguments, into 1,024 bytes."""

DEEPEST = 32
_GOAL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ,'-]{0,299}")
_TEXT = re.compile(r"[ \t\r\n!-~]*")
_TOKEN = re.compile(r"[()]|[^\s()]+")
_NAME = re.compile(r"[A-Za-z0-9_?=:.+-]+")
_SECTIONS = ["problem", ":domain", ":objects", ":init", ":goal"]
_REMEDY = "take games that alfworld's own tools, or the stage alfworld-games, have made"


def check_goal(goal: object, *, where: str) -> str:
    """`goal` if it is a plain sentence; braces, brackets and quotes would mean something in a grammar.

    Raises:
        DataError: it is not.
    """
    if not isinstance(goal, str) or _GOAL.fullmatch(goal) is None:
        raise DataError(f"not a goal sentence: {str(goal)[:80]!r}", code="invalid_goal", where=where, remedy=_REMEDY)
    return goal


def check_problem(problem: object, *, where: str) -> str:
    """`problem` if it is one PDDL problem of ALFRED's domain, of names and sections that such problems have.

    Raises:
        DataError: it is not; with the reason.
    """
    reason = _defect(problem)
    if reason is not None:
        raise DataError(f"not a PDDL problem of ALFRED: {reason}", code="invalid_problem", where=where, remedy=_REMEDY)
    assert isinstance(problem, str)
    return problem


def _defect(problem: object) -> str | None:
    if not isinstance(problem, str):
        return f"a {type(problem).__name__}"
    if len(problem) > LONGEST_PROBLEM:
        return f"{len(problem)} characters, more than {LONGEST_PROBLEM}"
    if _TEXT.fullmatch(problem) is None:
        return "characters that are not ASCII"
    depth, sections, previous, closed = 0, [], "", False
    for match in _TOKEN.finditer(problem):
        token = match[0]
        if closed:
            return "text after its end"
        if token == "(":
            depth += 1
            if depth > DEEPEST:
                return f"more than {DEEPEST} levels"
        elif token == ")":
            depth -= 1
            closed = depth <= 0
        elif len(token) > LONGEST_NAME:
            return f"a name of {len(token)} characters"
        elif _NAME.fullmatch(token) is None:
            return f"the name {token[:40]!r}"
        elif previous == "(" and depth == 2:
            sections.append(token.lower())
        elif depth == 1 and token != "define":
            return f"{token[:40]!r} outside of its sections"
        elif depth == 2 and sections[-1:] == [":domain"] and token.lower() != "alfred":
            return f"the domain {token[:40]!r}"
        elif depth == 0:
            return f"{token[:40]!r} before its beginning"
        previous = token
    if not closed:
        return "its parentheses do not match"
    if sections not in (_SECTIONS, [*_SECTIONS, ":metric"]):
        return f"the sections {sections}, expected {_SECTIONS}"
    return None
