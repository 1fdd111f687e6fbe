"""Plans as one would act who does not know where things are: with looks into places where they are not."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from random import Random

from armature.components.environments.alfworld import packaged
from armature.components.environments.alfworld.games.problems import escaped
from armature.components.environments.alfworld.games.scenes import may_hold
from armature.components.environments.alfworld.names import names_of

_REACHED = re.compile(r"\(receptacleatlocation (\S+) ([^\s)]+)\)")


def with_detours(plan: Sequence[str], problem: str, most: int, random: Random) -> list[str]:
    """`plan` after 0 to `most` visits, each as likely, to places where its first object could be and is not.

    A closed place is opened. A visit is left out where one stands for the next as well: one cannot go where one
    stands. Whoever learns from plans that go straight to an object never sees a place without it.
    """
    taken = next((command for command in plan if command.startswith("take ")), "")
    target, _, host = taken.removeprefix("take ").partition(" from ")
    if not host:
        return list(plan)
    constants = packaged.constants()
    kinds = {name.lower(): name for name in constants.OBJECTS_SET | constants.RECEPTACLES}
    names = names_of(problem)
    places = {said: kinds.get(said.split()[0], "") for said in names.values()}
    reached = dict(_REACHED.findall(problem.lower()))
    standing = {said: reached.get(escaped(identity), said) for identity, said in names.items()}
    likely = sorted(
        said
        for said, kind in places.items()
        if said != host and kind in constants.RECEPTACLES - constants.MOVABLE_RECEPTACLES_SET
        if may_hold(kind, kinds.get(target.split()[0], ""))
    )
    commands: list[str] = []
    visits = random.sample(likely, min(len(likely), random.randint(0, most)))
    for place, following in pairwise([*visits, host]):
        if standing[place] == standing[following]:
            continue
        commands.append(f"go to {place}")
        if places[place] in constants.OPENABLE_CLASS_SET:
            commands.append(f"open {place}")
    return [*commands, *(command for command in plan if command not in commands or not command.startswith("open "))]
