"""Environments that somebody else wrote: anything may be returned or raised anywhere."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.images import EncodedImage
from armature.components.rollouts.collect import collect
from armature.components.rollouts.table import read_rollouts, write_rollouts
from tests.builders import make_machine
from tests.fuzz.doors import Attempt, expect
from tests.fuzz.mutate import hostile_value
from tests.rollouts.conftest import SAMPLING, RecordedEvents, ScriptedPolicy

GROUPS, MEMBERS = 2, 3
RAISED: tuple[type[BaseException], ...] = (
    *(ValueError, SystemExit, asyncio.CancelledError, StopIteration, StopAsyncIteration, MemoryError, RecursionError),
    *(GeneratorExit, OSError, TimeoutError),
)
TEXTS = ("red", "\ud800", "", "\0", "<action>", "é" * 300)


class Hostile:
    """An environment that follows the protocol, except in the episode of its last task: there, one random method
    misbehaves."""

    name, system_prompt, dialogue, max_turns = "hostile", None, True, 2
    reward_weights = {"correct": 1.0}  # noqa: RUF012  the protocol's attribute

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.place = rng, rng.choice(("reset", "step", "close", "episode"))

    def tasks(self, split: str) -> list[Task]:
        return [Task(f"t{number}", "train", {"number": number}) for number in range(GROUPS)]

    def episode(self, task: Task) -> Any:
        hostile = task.payload["number"] == GROUPS - 1
        if hostile and self.place == "episode":
            return self.misbehave(None)
        return HostileEpisode(self, hostile)

    def close(self) -> None: ...

    def misbehave(self, honest: Any) -> Any:
        """Raise a random exception, or return either a hostile value or the correct value `honest` with one field
        replaced."""
        kind = self.rng.random()
        if kind < 0.25:
            raise self.rng.choice(RAISED)("hostile")
        if kind < 0.45 or honest is None:
            return hostile_value(self.rng)
        fields = {name: getattr(honest, name) for name in honest.__dataclass_fields__}
        name = self.rng.choice(list(fields))
        odd = (hostile_value(self.rng), (EncodedImage(b"no", "image/png"),), ({},), (1,), {"correct": "1"}, {1: 1.0})
        try:
            return type(honest)(**{**fields, name: self.rng.choice(odd)})
        except Exception:  # a value that the contract itself refuses
            return None


class HostileEpisode:
    def __init__(self, environment: Hostile, hostile: bool) -> None:
        self.environment, self.hostile = environment, hostile

    def _at(self, place: str, honest: Any) -> Any:
        return self.environment.misbehave(honest) if self.hostile and self.environment.place == place else honest

    async def reset(self) -> Any:
        return self._at("reset", Observation(("which?",), ("red",), "start"))

    async def step(self, action: str) -> Any:
        return self._at("step", Outcome(None, {"correct": float(action == "red")}))

    async def close(self) -> Any:
        return self._at("close", None)


@contextmanager
def door(folder: Path) -> Iterator[Attempt]:
    images = ImageStore(folder / "images")

    def attempt(rng: random.Random) -> bool:
        environment = Hostile(rng)
        policy = ScriptedPolicy(lambda messages, seed: TEXTS[seed % len(TEXTS)])
        outputs = asyncio.run(
            collect(
                environment,  # type: ignore[arg-type]
                environment.tasks("train"),
                MEMBERS,
                policy,
                images,
                SAMPLING,
                step=1,
                seed=rng.randrange(1000),
                machine=make_machine(environment_timeout=5.0),
                events=RecordedEvents(),
            )
        )
        planned = GROUPS * MEMBERS
        expect(len(outputs.trajectories) + len(outputs.failures) == planned, "a rollout is missing")
        honest = [each for each in outputs.failures if each.task_id == "t0" and each.reason != "bad_text"]
        expect(not honest, f"honest rollouts failed: {honest[:1]}")
        expect(all(failure.reason.isidentifier() for failure in outputs.failures), "a failure without a reason")
        target = folder / f"table-{rng.randrange(10**9)}"
        target.mkdir()
        write_rollouts(target, outputs)
        again = read_rollouts(target)
        expect(len(again.trajectories) == len(outputs.trajectories), "the table lost rollouts")
        return not outputs.failures

    yield attempt
