"""Scripted policy that reads the simulator's state: it picks up one object and puts it somewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.robots import RobotObservation
from armature.components.robots.libero.scripted.plans import Observed, PickPlacePlan, plan_for, upwards

if TYPE_CHECKING:
    from armature.components.robots.libero.simulator import LiberoSimulator


Vector = NDArray[np.float64]

METERS, RADIANS = 0.05, 0.5
"""Translation in meters and rotation in radians per step that an action's value of 1 requests."""

OPEN, CLOSE = -1.0, 1.0
MOST_RETRIES = 2
_GAIN, _TURN_GAIN = 1.5, 1.0
_MOST, _MOST_TURN = 1.0, 0.5  # of an action
_DESCENT = 0.6
_LIFT = 0.10  # meters
_STILL = 0.0015  # meters: less is not motion
_OPENING = 5  # steps


class ScriptedPolicy:
    """State machine with the phases above, descend, close, lift, move, lower, open, retreat, then done or failed.

    If the object does not rise, or is lost on the way, the policy starts again, at most `MOST_RETRIES` times.
    """

    def __init__(self, plan: PickPlacePlan) -> None:
        self.plan, self.retries = plan, 0
        self._phases: dict[str, Callable[[Observed, Vector, Vector], Vector]] = {
            "above": self._above,
            "descend": self._descend,
            "close": self._close,
            "lift": self._lift,
            "move": self._move,
            "lower": self._lower,
            "open": self._open,
            "retreat": self._retreat,
        }
        self._turn = self._start = self._grasp = np.zeros(3)
        self._offset = np.zeros(3)
        self._yaw = self._rest = 0.0
        self._new = True
        self._begin()

    @property
    def over(self) -> bool:
        """True if the episode has ended."""
        return self.phase in ("done", "failed")

    def act(self, seen: Observed) -> Vector:
        """Return the next action (7,). seen: current values of robosuite's sensors, by name."""
        hand, item = seen["robot0_eef_pos"], seen[f"{self.plan.item}_pos"]
        if self._new:
            self._offset, self._yaw = self.plan.grasp(seen)
            self._new = False
        self._steps += 1
        if self.over:
            return self._command(seen, hand, OPEN)
        return self._phases[self.phase](seen, hand, item)

    def _above(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        """Move the open gripper above the grasp position and turn it on the way. Stay high while it is far away."""
        grasp = item + self._offset
        goal = grasp + upwards(self.plan.hover)
        way = goal - hand
        sideways = _length(way[:2])
        height = max(goal[2], self.plan.cruise) if sideways > 0.06 else goal[2]
        action = self._command(seen, np.array([goal[0], goal[1], height]), OPEN)
        there = sideways < 0.012 and abs(way[2]) < 0.03 and _length(self._turn) < 0.12
        if there or self._steps > 90:
            self._start, self._grasp = hand.copy(), grasp
            self._enter("descend")
        return action

    def _descend(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        """Move the gripper straight down until it is at the grasp position or something blocks it."""
        goal = self._grasp.copy()
        way = goal - hand
        sideways = _length(way[:2])
        if sideways > 0.02:
            goal[2] = max(goal[2], hand[2])
        if (abs(way[2]) < 0.006 and sideways < 0.008) or self._stalled(hand[2], 12, 6):
            self._enter("close")
        return self._command(seen, goal, OPEN, upright=_DESCENT)

    def _close(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        """Close the gripper. The fingers need eight steps to close fully; a light object needs a few more to settle."""
        if self._steps == 1:
            self._start, self._rest = hand.copy(), float(item[2])
        fingers = seen["robot0_gripper_qpos"]
        if self._stalled(fingers[0] - fingers[1], 11, 3) or self._steps >= 16:
            self._enter("lift")
        return self._command(seen, self._start, CLOSE)

    def _lift(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        """Lift the object. Start and end slowly, because a jerk would let a bowl's rim slip out of the fingers."""
        if self._steps == 1:
            self._start = hand.copy()
        height = max(self._start[2] + _LIFT, self.plan.carry)
        if hand[2] > height - 0.02 or self._steps > 40:
            if item[2] < self._rest + 0.03:
                return self._again(seen, hand)
            self._enter("move")
        speed = min(1.0, 0.25 + 0.08 * self._steps)
        return self._command(seen, np.array([self._start[0], self._start[1], height]), CLOSE, upright=speed)

    def _move(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        """Move the object over the target. The hand may then be beside the target, if the object is tilted."""
        target = self.plan.target(seen)
        way = target[:2] - item[:2]
        if self._steps == 1:
            self._start = hand.copy()
        if self._lost(hand, item):
            return self._again(seen, hand)
        height = self._start[2]
        if _length(way) <= 0.05:
            height = min(height, target[2] + (hand[2] - item[2]) + self.plan.drop)
        if _length(way) < 0.012:
            self._enter("lower")
        elif self._steps > 120:
            self._enter("failed")
        return self._command(seen, np.array([hand[0] + way[0], hand[1] + way[1], height]), CLOSE)

    def _lower(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        way = self.plan.target(seen) - item
        if self._lost(hand, item):
            return self._again(seen, hand)
        if way[2] > -0.004 or self._stalled(hand[2], 8, 5) or self._steps > 40:
            self._enter("open")
        return self._command(seen, hand + way - upwards(0.004), CLOSE, upright=self.plan.lowering)

    def _open(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        if self._steps == 1:
            self._start = hand.copy()
        if self._steps >= _OPENING:
            self._enter("retreat")
        return self._command(seen, self._start, OPEN)

    def _retreat(self, seen: Observed, hand: Vector, item: Vector) -> Vector:
        if self._steps == 1:
            self._start = hand + upwards(_LIFT)
        if hand[2] > self._start[2] - 0.03 or self._steps > 15:
            self._enter("done")
        return self._command(seen, self._start, OPEN)

    def _again(self, seen: Observed, hand: Vector) -> Vector:
        action = self._command(seen, hand + upwards(0.05), OPEN)
        self.retries += 1
        if self.retries > MOST_RETRIES:
            self._enter("failed")
        else:
            self._begin()
        return action

    def _begin(self) -> None:
        self._new = True
        self._enter("above")

    def _enter(self, phase: str) -> None:
        self.phase, self._steps = phase, 0
        self._passed: list[float] = []

    def _stalled(self, value: float, least: int, span: int) -> bool:
        """Return True if `value` has changed by less than `_STILL` over the last `span` calls.

        The first `least` calls of a phase return False.
        """
        self._passed.append(float(value))
        return len(self._passed) > least and abs(self._passed[-1] - self._passed[-span]) < _STILL

    def _lost(self, hand: Vector, item: Vector) -> bool:
        return _length(item - hand) > self.plan.reach

    def _command(self, seen: Observed, goal: Vector, gripper: float, upright: float = _MOST) -> Vector:
        """Return the action that moves the hand toward position `goal` and turns the gripper to point down.

        upright: maximum vertical speed, as a part of the largest action.
        """
        move = _GAIN * (goal - seen["robot0_eef_pos"]) / METERS
        most = np.array([_MOST, _MOST, upright])
        self._turn = rotation_vector(pointing_down(self._yaw) @ rotation_matrix(seen["robot0_eef_quat"]).T)
        turn = np.clip(_TURN_GAIN * self._turn / RADIANS, -_MOST_TURN, _MOST_TURN)
        return np.concatenate([np.clip(move, -most, most), turn, [gripper]])


def pointing_down(yaw: float) -> Vector:
    """Return the rotation of a gripper whose fingers point down and open along the direction yaw - 90 degrees."""
    cosine, sine = math.cos(yaw), math.sin(yaw)
    return np.array([[cosine, sine, 0.0], [sine, -cosine, 0.0], [0.0, 0.0, -1.0]])


def rotation_matrix(quaternion: Vector) -> Vector:
    """Return the rotation matrix of a unit quaternion (x, y, z, w)."""
    x, y, z, w = quaternion
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - z * w), 2 * (x * z + y * w)],
            [2 * (x * y + z * w), 1 - 2 * (x * x + z * z), 2 * (y * z - x * w)],
            [2 * (x * z - y * w), 2 * (y * z + x * w), 1 - 2 * (x * x + y * y)],
        ]
    )


def rotation_vector(rotation: Vector) -> Vector:
    """Return axis times angle of a rotation matrix, with the angle below 180°."""
    angle = math.acos(min(1.0, max(-1.0, (float(np.trace(rotation)) - 1) / 2)))
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    length = _length(axis)
    return np.zeros(3) if angle < 1e-6 or length < 1e-9 else axis / length * angle


def _length(vector: Vector) -> float:
    return float(np.linalg.norm(vector))


# --- Episodes of the scripted policy ---


@dataclass(frozen=True)
class DemonstrationOutcome:
    """Result of an episode. phase: the policy's last phase. retries: how often it grasped the object again."""

    success: bool
    steps: int
    phase: str
    retries: int


def demonstrate(
    simulator: LiberoSimulator, initial_state: int, seed: int, noise: float, limit: int, watch: bool = True
) -> Iterator[tuple[RobotObservation, NDArray[np.float32]] | DemonstrationOutcome]:
    """Yield each step's observation and action, then the outcome: success if the goal holds at the end.

    Args:
        seed: seed of the positions of fixtures and of the noise.
        noise: standard deviation of the noise added to the three translations before execution. The yielded action is
            without noise, so that a policy trained on it learns to return to the path.
        limit: maximum number of steps.
        watch: False: nothing is rendered and no step is yielded.

    Raises:
        ConfigurationError: the scripted policy does not support the task.
    """
    simulator.reset(initial_state, seed)
    controller, rng = ScriptedPolicy(plan_for(simulator)), np.random.default_rng(seed)
    success, steps = False, 0
    while not (controller.over or (success and simulator.reaching)) and steps < limit:
        action = controller.act(simulator.observed).astype(np.float32)
        if watch:
            yield simulator.observe(), action
        disturbed = action.copy()
        disturbed[:3] += rng.normal(0.0, noise, 3).astype(np.float32)
        success, steps = simulator.step(disturbed), steps + 1
    yield DemonstrationOutcome(
        success and (controller.phase == "done" or simulator.reaching), steps, controller.phase, controller.retries
    )
