"""Groups of rollouts, played at the same time."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

from armature.components.artifacts.disk import raising_disk_full
from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Environment, Task
from armature.components.contracts.errors import ConfigurationError, RolloutFailed
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import Failure, GenerateOutputs, Trajectory
from armature.components.contracts.stages import Events
from armature.components.environments.guarded import HANDLES
from armature.components.inference.client import Sampling
from armature.components.rollouts.play import EpisodeRunner, Generator, RolloutId, SharedImages

# How many files this process may have open at once: episodes and requests take some each.

OTHER_FILES = 512
"""For what is neither an episode nor its request."""


def allow_episodes(at_once: int) -> None:
    """`allow_open_files` for as many episodes, each with a request in flight."""
    allow_open_files(OTHER_FILES + (HANDLES + 1) * at_once)


def allow_open_files(count: int) -> None:
    """Raise the soft limit to `count` where it is below.

    Raises:
        ConfigurationError: the hard limit is below it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ConfigurationError(
            f"a process of this user may open {hard} files, and {count} are needed",
            code="too_few_open_files",
            where="machine.limits.max_concurrent",
            remedy="lower machine.limits.max_concurrent, or raise the limit (ulimit -n)",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


async def collect(
    environment: Environment,
    tasks: Sequence[Task],
    group_size: int,
    pool: Generator,
    images: ImageStore,
    sampling: Sampling,
    *,
    step: int,
    seed: int,
    machine: Machine,
    events: Events,
    first_group: int = 0,
    name: str = "rollouts",
    room: asyncio.Semaphore | None = None,
) -> GenerateOutputs:
    """Play `group_size` rollouts of each task; `tasks[g]` becomes group `first_group + g` of step `step`.

    At most `machine.limits.max_concurrent` episodes are in flight, or as many as there is `room` for. A rollout that
    fails becomes a `Failure` and leaves the others alone. The result is in the order of the plan, whatever finished
    first. `name` is what is counted.

    Raises:
        ConfigurationError: this user may not open as many files as `machine.limits.max_concurrent` episodes take.
        ServerError: no request can be answered any more, so no rollout can be played.
        StoreError: an image cannot be stored, as the disk is full.
    """
    allow_episodes(machine.limits.max_concurrent)
    player = EpisodeRunner(environment, pool, SharedImages(images), sampling, seed, machine.limits.environment_timeout)
    finished = CollectionProgress(name, len(tasks) * group_size, events)

    async def play(task: Task, place: RolloutId) -> Trajectory | Failure:
        try:
            result: Trajectory | Failure = await player.play(task, place)
        except RolloutFailed as failed:
            result = Failure(place.trajectory_id, place.group_id, task.task_id, failed.reason, failed.detail)
        finished.add(result)
        return result

    room = room or asyncio.Semaphore(machine.limits.max_concurrent)
    with raising_disk_full(images.root):
        outputs = await play_groups(play, tasks, group_size, room, step=step, first_group=first_group)
    if outputs.failures:
        events.message(failures_said(outputs.failures, len(tasks) * group_size, f"{name}, step {step}"))
    return outputs


async def play_groups(
    play: Callable[[Task, RolloutId], Awaitable[Trajectory | Failure]],
    tasks: Sequence[Task],
    group_size: int,
    room: asyncio.Semaphore,
    *,
    step: int,
    first_group: int = 0,
) -> GenerateOutputs:
    """`play` for every member of every group, as many at once as there is `room` for; see `collect`."""

    async def one(task: Task, place: RolloutId) -> Trajectory | Failure:
        async with room:
            return await play(task, place)

    try:
        async with asyncio.TaskGroup() as episodes:
            running = [
                episodes.create_task(one(task, RolloutId(step, group, member)))
                for group, task in enumerate(tasks, first_group)
                for member in range(group_size)
            ]
    except BaseExceptionGroup as errors:  # what concerns the whole run, such as a full disk
        raise errors.exceptions[0] from None
    results = [episode.result() for episode in running]
    return GenerateOutputs(
        tuple(result for result in results if isinstance(result, Trajectory)),
        tuple(result for result in results if isinstance(result, Failure)),
    )


class CollectionProgress:
    """Counts what is finished and shows it with the mean reward so far."""

    def __init__(self, name: str, planned: int, events: Events) -> None:
        self._name, self._planned, self._events = name, planned, events
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
        self._events.progress(self._name, self._done, self._planned, **postfix)


def failures_said(failures: Sequence[Failure], planned: int, what: str) -> str:
    """How many of the `planned` rollouts of `what` failed, by reason, with the first of each."""
    first = {failure.reason: failure for failure in reversed(failures)}
    lines = [f"{what}: {len(failures)} of {planned} rollouts failed:"]
    for reason, count in sorted(Counter(failure.reason for failure in failures).items()):
        lines.append(f"  {count} {reason}, the first is {first[reason].trajectory_id}: {first[reason].detail[:200]}")
    return "\n".join(lines)
