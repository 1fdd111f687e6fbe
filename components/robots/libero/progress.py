"""Progress of a LIBERO task, measured by the simulator's predicates, contacts and distances."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class GoalProgress:
    """Progress of one goal predicate.

    holds: the predicate is true.
    reach: distance in meters from the gripper to the predicate's object.
    grasped: both fingers touch the object.
    place: distance in meters from the object to its target; None without a target, as for a drawer to be opened.
    """

    holds: bool
    reach: float
    grasped: bool
    place: float | None


def goal_progress(environment: Any, goal: list[list[str]], hand: Any, reached: bool | None) -> list[GoalProgress]:
    """Return the progress of each goal predicate in LIBERO's `environment`.

    Args:
        goal: predicates as in the task's BDDL file.
        hand: position of the gripper.
        reached: for a task with `reach_distance`, True if the gripper is near the object of the first predicate; None
            for other tasks.
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
