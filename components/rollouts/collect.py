"""Groups of rollouts, played at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from components.artifacts.images import ImageStore
from components.contracts.episodes import Environment, Task
from components.contracts.machine import Machine
from components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from components.contracts.stages import Events
from components.rollouts.conversation import SharedImages
from components.rollouts.failures import RolloutFailed
from components.rollouts.generator import Generator
from components.rollouts.opening import Opening
from components.rollouts.play import Place, Player

if TYPE_CHECKING:
    from components.inference.settings import EvaluationSamplingSettings, SamplingSettings


ResultT = TypeVar("ResultT")


async def collect(
    environment: Environment,
    tasks: Sequence[Task],
    group_size: int,
    pool: Generator,
    images: ImageStore,
    sampling: SamplingSettings | EvaluationSamplingSettings,
    *,
    step: int,
    seed: int,
    machine: Machine,
    events: Events,
) -> GenerateOutputs:
    """Play `group_size` rollouts of each task; `tasks[g]` becomes group g of step `step`.

    The members of a group play at the same time; of groups, as many as keep at most `machine.max_concurrent`
    episodes under way (one group at least). A rollout that fails becomes a `Failure` and leaves
    the others alone. The result is in the order of the plan, whatever finished first.

    Raises:
        ServerError: no request can be answered any more, so no rollout can be played.
        OSError: an image cannot be stored, as on a full disk.
    """
    player = Player(environment, pool, SharedImages(images), sampling, seed, machine.environment_timeout)
    limit = asyncio.Semaphore(max(1, machine.max_concurrent // group_size))
    finished = Tally(len(tasks) * group_size, events)

    async def play(task: Task, place: Place, opening: Opening) -> Trajectory | Failure:
        try:
            result: Trajectory | Failure = await player.play(task, place, opening)
        except RolloutFailed as failed:
            detail = _readable(failed.detail)
            result = Failure(place.trajectory_id, place.group_id, task.task_id, failed.reason, detail)
        finished.add(result)
        return result

    async def play_group(task: Task, group: int) -> list[Trajectory | Failure]:
        places = [Place(step, group, member) for member in range(group_size)]
        opening = player.opening(places[0], group_size)
        async with limit:
            return await _together([play(task, place, opening) for place in places])

    groups = await _together([play_group(task, group) for group, task in enumerate(tasks)])
    results = [result for group in groups for result in group]
    outputs = GenerateOutputs(
        tuple(result for result in results if isinstance(result, Trajectory)),
        tuple(result for result in results if isinstance(result, Failure)),
    )
    if outputs.failures:
        events.message(_summary(outputs, step))
    return outputs


async def _together(work: Sequence[Coroutine[Any, Any, ResultT]]) -> list[ResultT]:
    """All results in order; the first error cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


class Tally:
    """Counts what is finished and shows it with the mean reward so far."""

    def __init__(self, planned: int, events: Events) -> None:
        self._planned, self._events = planned, events
        self._done, self._failed, self._reward = 0, 0, 0.0

    def add(self, result: Trajectory | Failure) -> None:
        self._done += 1
        if isinstance(result, Failure):
            self._failed += 1
        else:
            self._reward += result.reward
        postfix = {"rew": self._reward / max(1, self._done - self._failed)}
        if self._failed:
            postfix["failed"] = self._failed
        self._events.progress("rollouts", self._done, self._planned, **postfix)


def _readable(detail: str) -> str:
    """At most 2,000 characters, all of them valid Unicode."""
    return detail.encode(errors="replace").decode()[:2000]


def _summary(outputs: GenerateOutputs, step: int) -> str:
    planned = len(outputs.trajectories) + len(outputs.failures)
    first = {failure.reason: failure for failure in reversed(outputs.failures)}
    lines = [f"step {step}: {len(outputs.failures)} of {planned} rollouts failed and are left out"]
    for reason, count in sorted(outputs.drops.items()):
        lines.append(f"  {count} {reason}, the first is {first[reason].trajectory_id}: {first[reason].detail[:200]}")
    return "\n".join(lines)
