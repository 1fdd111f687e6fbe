"""How far a task of LIBERO has come, by the simulator's own predicates, contacts and distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class GoalProgress:
    """Of one predicate of the task's goal.

    holds: whether it is true. reach: meters from the gripper to what it is about. grasped: both fingers touch that.
    place: meters from there to where it goes; None where it goes nowhere, as a drawer that is to be opened.
    """

    holds: bool
    reach: float
    grasped: bool
    place: float | None


def goal_progress(environment: Any, goal: list[list[str]], hand: Any, reached: bool | None) -> list[GoalProgress]:
    """Of LIBERO's environment.

    Args:
        goal: predicates, as the task's file has them. hand: the gripper's position.
        reached: of a task that is solved near the object of the first predicate, whether it is; None for any other.
    """
    if reached is not None:
        way = float(np.linalg.norm(environment.object_states_dict[goal[0][1]].get_geom_state()["pos"] - hand))
        return [GoalProgress(reached, way, False, None)]
    return [_of_predicate(environment, predicate, hand) for predicate in goal]


def _of_predicate(environment: Any, predicate: list[str], hand: Any) -> GoalProgress:
    states, (_, thing, *place) = environment.object_states_dict, predicate
    at, item = states[thing].get_geom_state()["pos"], environment.objects_dict.get(thing)
    gripper = environment.robots[0].gripper
    return GoalProgress(
        holds=bool(environment._eval_predicate(predicate)),
        reach=float(np.linalg.norm(at - hand)),
        grasped=item is not None and bool(environment._check_grasp(gripper, item.contact_geoms)),
        place=float(np.linalg.norm(states[place[0]].get_geom_state()["pos"] - at)) if place else None,
    )
