"""Collect groups of rollouts concurrently."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Sequence

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

# --- The limit on open files: episodes and requests need some each ---

OTHER_FILES = 512
"""Number of open files to allow in addition to the files that episodes and their requests need."""


def allow_episodes(at_once: int) -> None:
    """Raise this process's limit on open files to what `at_once` concurrent episodes need. Each has a request in
    flight."""
    allow_open_files(OTHER_FILES + (HANDLES + 1) * at_once)


def allow_open_files(count: int) -> None:
    """Raise this process's soft limit on open files to at least `count`.

    Raises:
        ConfigurationError: the hard limit is below `count`.
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
    only: Collection[RolloutId] | None = None,
) -> GenerateOutputs:
    """Play `group_size` rollouts of each task; `tasks[g]` becomes group `first_group + g` of step `step`.

    A rollout that fails becomes a `Failure` and does not affect the others. Results are in the order of tasks and
    members, whichever finished first.

    Args:
        name: label of the progress bar and of messages.
        room: limits the episodes in flight; None: `machine.limits.max_concurrent` of this call.
        only: play only these of the planned rollouts, with the same requests as if all were played; None: play all.

    Raises:
        ConfigurationError: this user may not open as many files as `machine.limits.max_concurrent` episodes need.
        ServerError: no server can answer requests any more.
        StoreError: an image cannot be stored because the disk is full.
    """
    allow_episodes(machine.limits.max_concurrent)
    player = EpisodeRunner(environment, pool, SharedImages(images), sampling, seed, machine.limits.environment_timeout)
    planned = len(tasks) * group_size if only is None else len(only)
    finished = CollectionProgress(name, planned, events)

    async def play(task: Task, place: RolloutId) -> Trajectory | Failure:
        try:
            result: Trajectory | Failure = await player.play(task, place)
        except RolloutFailed as failed:
            result = Failure(place.trajectory_id, place.group_id, task.task_id, failed.reason, failed.detail)
        finished.add(result)
        return result

    room = room or asyncio.Semaphore(machine.limits.max_concurrent)
    with raising_disk_full(images.root):
        outputs = await play_groups(play, tasks, group_size, room, step=step, first_group=first_group, only=only)
    if outputs.failures:
        events.message(failures_said(outputs.failures, planned, f"{name}, step {step}"))
    return outputs


async def play_groups(
    play: Callable[[Task, RolloutId], Awaitable[Trajectory | Failure]],
    tasks: Sequence[Task],
    group_size: int,
    room: asyncio.Semaphore,
    *,
    step: int,
    first_group: int = 0,
    only: Collection[RolloutId] | None = None,
) -> GenerateOutputs:
    """Call `play` concurrently for every member of every group, and return the results in the order of `collect`.

    Each call acquires the semaphore `room` first, which limits the number of calls at once.
    """

    async def one(task: Task, place: RolloutId) -> Trajectory | Failure:
        async with room:
            return await play(task, place)

    try:
        async with asyncio.TaskGroup() as episodes:
            running = [
                episodes.create_task(one(task, place))
                for group, task in enumerate(tasks, first_group)
                for place in (RolloutId(step, group, member) for member in range(group_size))
                if only is None or place in only
            ]
    except BaseExceptionGroup as errors:  # an error of the whole run, such as a full disk
        raise errors.exceptions[0] from None
    results = [episode.result() for episode in running]
    return GenerateOutputs(
        tuple(result for result in results if isinstance(result, Trajectory)),
        tuple(result for result in results if isinstance(result, Failure)),
    )


class CollectionProgress:
    """Count finished rollouts, and report them with the mean reward so far."""

    def __init__(self, name: str, planned: int, events: Events) -> None:
        self._name, self._planned, self._events = name, planned, events
        self._done, self._failed, self._reward = 0, 0, 0.0

    def add(self, result: Trajectory | Failure) -> None:
        """Count one finished or failed rollout, and report the progress."""
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
    """Return a message with the number of failed rollouts, of `planned` ones, for each reason, with the first example
    of each reason. The message begins with `what`."""
    first = {failure.reason: failure for failure in reversed(failures)}
    lines = [f"{what}: {len(failures)} of {planned} rollouts failed:"]
    for reason, count in sorted(Counter(failure.reason for failure in failures).items()):
        lines.append(f"  {count} {reason}, the first is {first[reason].trajectory_id}: {first[reason].detail[:600]}")
    return "\n".join(lines)
