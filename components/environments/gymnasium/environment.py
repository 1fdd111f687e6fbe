"""The environment `gymnasium`: its tasks are seeds, and its episodes play in worker processes."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Annotated, Any, ClassVar
from weakref import WeakValueDictionary, finalize

import numpy as np
from pydantic import Field, PlainValidator, StrictStr, TypeAdapter

from armature.components.artifacts.sources import code_digest, named_files, versions
from armature.components.contracts.digests import document_digest
from armature.components.contracts.episodes import ActionDefect, Observation, Outcome, Task
from armature.components.contracts.errors import ConfigurationError, said
from armature.components.contracts.images import EncodedImage
from armature.components.environments.generated import GeneratedEnvironment
from armature.components.environments.gymnasium.settings import SEED, GymnasiumSettings, call_tables
from armature.components.machine.project import VARIABLE as PROJECT
from armature.components.machine.project import find_module, load_object, project_folder
from armature.components.machine.workers.channel import IdleWorkerLost, WorkerError
from armature.components.machine.workers.pool import WorkerPool
from armature.components.machine.workers.requests import NOTHING, ReplyForm, ReplyT, array_of
from armature.components.machine.workers.worker import Worker, current_cluster, make_worker

WORKER = "armature.components.environments.gymnasium.worker"
START_SECONDS = 120.0
"""Seconds that a process may take to start and to import the environment's modules."""
MOST_BYTES = 2**27
"""Largest reply of a process to one turn, in bytes."""
SEEDS = 2**31
"""Seeds are smaller than this number, because numpy's older generators accept no larger ones."""
SPACING = 1_000_003
"""Offset between task numbers of consecutive seeds: the tasks of seed s begin at s * SPACING."""
DRAWS = 16
"""Seeds that a task may try until the arguments made from one belong to its split."""
_PNG = Annotated[Any, PlainValidator(array_of(np.uint8, 1))]


class TurnReply(ReplyForm):
    """The reply of a process to a turn: the fields of `GameTurn`, with images as arrays of a PNG file's bytes."""

    content: Annotated[tuple[StrictStr | _PNG, ...], Field(strict=False)]
    admissible: Annotated[tuple[str, ...] | None, Field(strict=False)]
    anchor: str
    reward: float
    ended: bool
    success: bool
    defect: ActionDefect | None


TURN_REPLY = TypeAdapter(TurnReply)
ANSWERS = TypeAdapter(list[str])


class GymnasiumPool(WorkerPool[Worker]):
    """A pool of processes, each of which plays many games. They end when nothing refers to the pool any more."""

    def __init__(self, settings: GymnasiumSettings, processes: int) -> None:
        env = {PROJECT: str(project_folder().resolve()), "SDL_VIDEODRIVER": "dummy", "PYGAME_HIDE_SUPPORT_PROMPT": "1"}
        values = {"settings": settings.model_dump(mode="json")}
        timeout = settings.call_timeout
        super().__init__(
            lambda: make_worker(WORKER, values, timeout=timeout, env=env, most_bytes=MOST_BYTES), processes
        )
        self.numbers = itertools.count()
        finalize(self, _close, self.workers)


def _close(workers: tuple[Worker, ...]) -> None:
    for worker in workers:
        worker.close()


_SHARED: WeakValueDictionary[tuple[str, ...], GymnasiumPool] = WeakValueDictionary()
_SHARING = threading.Lock()


def shared_pool(settings: GymnasiumSettings, processes: int) -> GymnasiumPool:
    """Return the pool of these settings on the current cluster or this machine; all callers share it."""
    key = settings.model_dump_json(), str(project_folder().resolve()), repr(current_cluster()), str(processes)
    with _SHARING:
        pool = _SHARED.get(key)
        if pool is None:
            pool = _SHARED[key] = GymnasiumPool(settings, processes)
        return pool


class GymnasiumEpisode:
    """An episode of one seed in a process. Its methods block until the process has answered.

    A call sends all answers so far. So an episode whose process was lost in a call of another episode goes on in a new
    one, where its answers are played again.
    """

    def __init__(self, pool: GymnasiumPool, task: Task, settings: GymnasiumSettings) -> None:
        self._pool, self._task, self._settings = pool, task, settings
        self._number = next(pool.numbers)
        self._worker = pool.workers[self._number % len(pool.workers)]
        self._answers: list[str] = []

    async def reset(self) -> Observation:
        return self._observation(self._play())

    async def step(self, action: str) -> Outcome:
        """Play an answer. One that is not valid plays nothing and costs the turn."""
        self._answers.append(action)
        turn = self._play()
        ended = turn.ended or len(self._answers) == self._settings.max_turns
        parts = {"reward": turn.reward} | ({"success": float(turn.success)} if ended else {})
        return Outcome(None if ended else self._observation(turn), parts, turn.defect)

    async def close(self) -> None:
        if self._worker.alive:
            with suppress(WorkerError):  # the process may have died meanwhile, with the game
                self._worker.call("end", self._number, reply=NOTHING)

    def _play(self) -> TurnReply:
        payload = self._task.payload
        arguments = self._number, payload["seed"], payload["make"], self._answers
        return _asked(self._worker, "play", *arguments, reply=TURN_REPLY)

    def _observation(self, turn: TurnReply) -> Observation:
        content = (one if isinstance(one, str) else EncodedImage(one.tobytes(), "image/png") for one in turn.content)
        return Observation(tuple(content), turn.admissible, turn.anchor)


def _asked(worker: Worker, method: str, *arguments: Any, reply: TypeAdapter[ReplyT]) -> ReplyT:
    """Return the reply of a worker, in a new process if a call of another episode has ended the last one."""
    for _ in range(2):
        with suppress(IdleWorkerLost):
            begin(worker)
            return worker.call(method, *arguments, reply=reply)
    raise WorkerError("the process ends between calls", code="environment_failed")


def begin(worker: Worker) -> None:
    """Start a worker's process, which may take longer than a turn."""
    if not worker.alive:
        worker.call("begin", reply=NOTHING, timeout=START_SECONDS)


class GymnasiumEnvironment(GeneratedEnvironment[GymnasiumSettings]):
    """An environment that is registered with Gymnasium. A task is a seed for its `reset`.

    Example:
        >>> settings = GymnasiumSettings(id="Taxi-v4", actions=tuple("snewpd"), max_turns=50, dialogue=False)
        >>> environment = GymnasiumEnvironment(settings, train_tasks=2, heldout_tasks=1, seed=0, processes=1)
        >>> [task.payload["seed"] for task in environment.tasks("train")]
        [0, 32]
    """

    name = "gymnasium"
    Settings: ClassVar[type[GymnasiumSettings]] = GymnasiumSettings

    def __init__(self, settings: GymnasiumSettings, **counts: int) -> None:
        super().__init__(settings, **counts)
        self.system_prompt, self.dialogue = settings.system_prompt, settings.dialogue
        self.max_turns = settings.max_turns
        self.reward_weights = {"reward": settings.reward_weight, "success": settings.success_weight}
        self._pool: GymnasiumPool | None = shared_pool(settings, self.processes)
        if settings.expert is not None:
            self.demonstration = self._demonstration  # without an expert a warm start finds no such method

    @staticmethod
    def sources(settings: GymnasiumSettings) -> dict[str, str]:
        """Return the version of gymnasium, and digests of modules and files that the settings name."""
        calls = [wrapper.call for wrapper in settings.wrappers] + [
            table["call"] for table in call_tables(settings.make)
        ]
        calls += [settings.expert] if settings.expert else []
        modules = {*settings.modules, *(call.partition(":")[0] for call in calls)}
        code = {}
        for module in sorted(each for each in modules if each.partition(".")[0] != "gymnasium"):
            find_module(module)
            code[module] = code_digest(module)
        return {**versions("gymnasium"), **code, **named_files(settings.make)}

    @staticmethod
    def refuse_ahead(settings: GymnasiumSettings, kind_field: str, most_images: int, most_videos: int) -> None:
        """Play two tasks in a process, as `GymnasiumHandler.probe` does.

        Raises:
            ConfigurationError: the environment cannot be made or does not repeat, or a conversation has more images
                than servers accept.
        """
        if settings.image != "none" and settings.dialogue and settings.max_turns > most_images:
            raise ConfigurationError(
                f"conversations of {settings.max_turns} turns have more images than servers accept: {most_images}",
                code="too_many_images",
                where="inference.max_images_per_prompt",
                remedy=f"set inference.max_images_per_prompt = {settings.max_turns}, or environment.args.dialogue = "
                "false",
            )
        with closing(GymnasiumEnvironment(settings, train_tasks=1, heldout_tasks=1, seed=0, processes=1)) as tried:
            tasks = [next(tried.tasks("train")).payload, next(tried.tasks("heldout")).payload]
            worker = shared_pool(settings, 1).workers[0]
            try:
                begin(worker)
                worker.call("probe", [[task["seed"], task["make"]] for task in tasks], reply=NOTHING)
            except WorkerError as error:
                raise ConfigurationError(
                    f"the environment cannot be played: {error.what}",
                    code="environment_not_played",
                    where="environment.args",
                    remedy="correct prompt, image and success, or the environment",
                ) from error

    def payload(self, seed: int, index: int) -> dict[str, Any]:
        """Return a seed, even for training and odd for held-out tasks, and the environment's arguments made from it.

        If the arguments depend on the seed, their digest is even or odd as well: no held-out map is a training map.
        """
        split = seed % 2
        for draw in range(DRAWS):
            number = (2 * (DRAWS * (self._seed * SPACING + index) + draw) + split) % SEEDS
            make = _made(self.settings.make, number)
            if make == self.settings.make or int(document_digest(make), 16) % 2 == split:
                return {"seed": number, "make": make}
        raise ConfigurationError(
            f"{DRAWS} seeds made the same arguments for {self.settings.id!r}",
            code="arguments_alike",
            where="environment.args.make",
            remedy='pass "{seed}" to the function that makes them, and let it make more than a few',
        )

    def episode(self, task: Task) -> GymnasiumEpisode:
        self._pool = self._pool or shared_pool(self.settings, self.processes)
        return GymnasiumEpisode(self._pool, task, self.settings)

    def _demonstration(self, task: Task) -> list[str]:
        self._pool = self._pool or shared_pool(self.settings, self.processes)
        worker = self._pool.workers[next(self._pool.numbers) % len(self._pool.workers)]
        return _asked(worker, "demonstrate", task.payload["seed"], task.payload["make"], reply=ANSWERS)

    def close(self) -> None:
        """Release the processes, which end with the last environment or episode that uses them."""
        self._pool = None


def _made(value: Any, seed: int) -> Any:
    """Return arguments with the seed in place of "{seed}" and results in place of calls."""
    if value == SEED:
        return seed
    if isinstance(value, list | tuple):
        return [_made(each, seed) for each in value]
    if not isinstance(value, Mapping):
        return value
    made = {key: _made(each, seed) for key, each in value.items()}
    if "call" not in made:
        return made
    function = load_object(made["call"], "the function")
    try:
        result = function(**made.get("args", {}))
        json.dumps(result, allow_nan=False)
    except Exception as error:
        raise ConfigurationError(
            f"{made['call']!r} failed, or returned no value for JSON, with seed {seed}: {said(error)}",
            code="make_call_failed",
            where="environment.args.make",
            remedy="correct the function or its args; it returns values that JSON has: lists, not arrays",
        ) from error
    return result
