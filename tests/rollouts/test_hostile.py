"""Environments that do what none should, at every place where one can: each costs its own rollouts and no other."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.episodes import Observation, Outcome, Task
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.images import EncodedImage
from armature.components.contracts.rollouts import GenerateOutputs
from armature.components.inference.client import GenerationFailure, ReservedToken
from armature.components.rl.metrics import rollout_metrics
from armature.components.rollouts.batches.advantages import groups_of
from armature.components.rollouts.settings import PenaltySettings
from armature.components.rollouts.table import read_rollouts, write_rollouts

from .conftest import RecordedEvents, ScriptedPolicy
from .test_collect import IMPATIENT, Counting, CountingEpisode, collecting, play, png, says

pytestmark = pytest.mark.waits


class Ends(BaseException):
    """A BaseException that is neither an `Exception` nor one of those that asyncio handles specially."""


class Unreadable(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


ERRORS: list[Callable[[], BaseException]] = [
    SystemExit,
    lambda: SystemExit(0),
    KeyboardInterrupt,
    asyncio.CancelledError,
    CancelledError,
    GeneratorExit,
    StopIteration,
    StopAsyncIteration,
    Ends,
    Unreadable,
    lambda: RuntimeError("\ud800" * 10_000),
    lambda: BaseExceptionGroup("several", [SystemExit(), ValueError()]),
    lambda: TimeoutError("mine"),
    lambda: OSError(28, "No space left on the environment's disk"),
    lambda: GenerationFailure("not the policy's", reason="x"),
    RecursionError,
    MemoryError,
]


@dataclass
class Hostile(Counting):
    """An environment whose task t1 calls `act` in the method called `place`. `act` raises an exception, or returns the
    value that the method then returns."""

    place: str = ""
    act: Callable[[], Any] = lambda: None
    turns: int = 2
    faults: dict[str, Any] = field(default_factory=dict)
    made: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)

    def episode(self, task: Task) -> Any:
        if task.task_id != "t1":
            return super().episode(task)
        if self.place == "episode":
            return self.act()
        return HostileEpisode(self, task)


class HostileEpisode(CountingEpisode):
    environment: Hostile

    async def fault(self, place: str) -> Any:
        return self.environment.act() if place == self.environment.place else None


def raising(make: Callable[[], BaseException]) -> Callable[[], Any]:
    def act() -> Any:
        raise make()

    return act


def only_its_own_rollouts(outputs: GenerateOutputs, reasons: set[str], folder: Path) -> None:
    """Check that only rollouts of task t1 failed, for one of the `reasons`, and that the finished rollouts can be
    stored, measured and grouped."""
    assert [trajectory.task_id for trajectory in outputs.trajectories if trajectory.task_id != "t1"] == ["t0", "t0"]
    mine = [failure for failure in outputs.failures if failure.task_id == "t1"]
    assert len(outputs.trajectories) + len(mine) == 4 and len(mine) == len(outputs.failures)
    assert {failure.reason for failure in mine} <= reasons, mine
    folder.mkdir(exist_ok=True)
    write_rollouts(folder, outputs)
    again = read_rollouts(folder)
    assert [one.trajectory_id for one in again.trajectories] == [one.trajectory_id for one in outputs.trajectories]
    assert again.drops == outputs.drops
    assert all(np.isfinite(value) for value in rollout_metrics(again).values())
    groups_of(again.trajectories, PenaltySettings(format=0.5, inadmissible=0.5))


@pytest.mark.parametrize("place", ["episode", "reset", "step", "close"])
def test_any_environment_error_fails_only_its_rollouts(place, store, events, tmp_path):
    for make in ERRORS:
        outputs = play(Hostile(place=place, act=raising(make)), says("yes"), store, events)
        assert outputs.drops == {"environment_error": 2}, make
        assert all(failure.detail.startswith(f"{place}: ") for failure in outputs.failures)
        only_its_own_rollouts(outputs, {"environment_error"}, tmp_path / "rollouts")


class Text(str):
    """A str whose methods give wrong results: it has no equality, and converts to other text."""

    def __eq__(self, other: object) -> bool:
        raise SystemExit(1)

    def __hash__(self) -> int:
        return 0

    def __str__(self) -> str:
        return "\ud800"

    def encode(self, *arguments: Any, **named: Any) -> bytes:
        return b""


class Endless(Mapping[str, float]):
    def __getitem__(self, name: str) -> float:
        return 1.0

    def __iter__(self) -> Iterator[str]:
        return map(str, itertools.count())

    def __len__(self) -> int:
        return 1


class EndlessTuple(tuple[str, ...]):
    def __iter__(self) -> Iterator[str]:
        return itertools.repeat("a")


class Boom:
    def __getattribute__(self, name: str) -> Any:
        raise SystemExit(2)


def bare(kind: type) -> Any:
    """Return an object of the class `kind` that has none of its attributes."""
    return object.__new__(kind)


def image(data: Any, media_type: Any) -> EncodedImage:
    """Return an EncodedImage whose constructor has not validated `data` and `media_type`."""
    made: EncodedImage = bare(EncodedImage)
    object.__setattr__(made, "data", data)
    object.__setattr__(made, "media_type", media_type)
    return made


ODD: list[Any] = [
    *(1j, Fraction(1, 3), np.float32(2.0), np.nan, np.bool_(True), np.zeros(3), b"bytes", 10**400, "a" * (2**22 + 1)),
    *(Text("yes"), EndlessTuple(), itertools.count(), (x for x in "ab"), object(), type, len, Boom(), Endless()),
    *(image(png(1), "image/png"), image(None, "image/png"), image("text", "image/png"), image(b"", "")),
    *(image(png(1), 7), image(png(1), "\ud800"), image(bytearray(png(1)), "image/png"), bare(EncodedImage)),
    *(bare(Observation), bare(Outcome), Observation(("fine",)), Outcome(None), asyncio.sleep, ValueError("not raised")),
    *({"yes": value} for value in (None, "1", np.zeros(2), 10**400)),
    *({7: 1.0}, {"\ud800": 1.0}, {Text("yes"): 1.0}, {"yes": True, "length": np.float32(1)}),
    {str(number): 0.0 for number in range(300)},
    {"yes": 1e308, "length": 1e308},
]
"""Objects of wrong or misleading types that an environment may return. The fuzz target "environments" tests plain
values."""

REASONS = {"environment_error", "bad_image", "bad_text", "bad_reward"}
FORMS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda value: value,
    "content": lambda value: Observation(value),
    "part": lambda value: Observation(("a", value)),
    "actions": lambda value: Observation(("a",), value),
    "action": lambda value: Observation(("a",), ("look", value)),
    "anchor": lambda value: Observation(("a",), None, value),
}
ENDINGS: dict[str, Callable[[Any], Any]] = {
    "observation": lambda value: Outcome(value),
    "parts": lambda value: Outcome(None, value),
    "value": lambda value: Outcome(None, {"yes": value}),
    "name": lambda value: Outcome(None, {value: 1.0}),
    "defect": lambda value: Outcome(None, {"yes": 1.0}, value),
    "info": lambda value: Outcome(None, {"yes": 1.0}, None, value),
}
PLACES: list[tuple[str, Callable[[Any], Any]]] = [
    *(("episode", form) for form in [FORMS["itself"]]),
    *(("reset", form) for form in FORMS.values()),
    *(("step", form) for form in ENDINGS.values()),
    *(("step", lambda value, form=form: Outcome(form(value))) for form in FORMS.values()),
    *(("close", form) for form in [FORMS["itself"]]),
]


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, len(PLACES) - 1), odd=st.integers(0, len(ODD) - 1))
def test_any_environment_return_fails_only_its_rollouts(place, odd, tmp_path):
    (where, form), value = PLACES[place], ODD[odd]  # by number: Hypothesis looks into what it draws

    def act() -> Any:
        try:
            return form(value)
        except TypeError:  # no key of a dict
            return value

    environment = Hostile(place=where, act=act)
    outputs = play(environment, says("yes"), ImageStore(tmp_path / "images"), RecordedEvents())
    only_its_own_rollouts(outputs, REASONS, tmp_path / "rollouts")
    for trajectory in outputs.trajectories:
        for turn in trajectory.turns:
            assert type(turn.reward) is float and all(type(part) is float for part in turn.reward_parts.values())


@pytest.mark.parametrize("place", ["episode", "reset", "step", "close"])
def test_endless_environment_call_fails_only_its_rollouts(place, store, events, tmp_path):
    """It blocks its thread: a coroutine that waits is what `test_collect` has."""
    released = threading.Event()
    try:
        environment = Hostile(place=place, act=lambda: released.wait(60))
        outputs = play(environment, says("yes"), store, events, machine=IMPATIENT)
        assert outputs.drops == {"environment_timeout": 2}
        only_its_own_rollouts(outputs, {"environment_timeout"}, tmp_path / "rollouts")
        assert not released.is_set()
    finally:
        released.set()


def test_uncancellable_call_fails_only_its_rollouts(store, events, tmp_path):
    over = threading.Event()

    async def stubborn(episode: CountingEpisode) -> None:
        while episode.task.task_id == "t1" and not over.is_set():
            try:
                await asyncio.sleep(0.01)
            except asyncio.CancelledError:
                continue

    outputs = play(Counting(step=stubborn), says("yes"), store, events, machine=IMPATIENT)
    over.set()
    only_its_own_rollouts(outputs, {"environment_timeout"}, tmp_path / "rollouts")
    assert outputs.drops == {"environment_timeout": 2}


def test_blocked_episode_is_closed_when_it_returns(store, events):
    released, closed = threading.Event(), threading.Event()

    class Late(HostileEpisode):
        async def close(self) -> None:
            closed.set()

    class Environment(Hostile):
        def episode(self, task: Task) -> Any:
            return Late(self, task) if task.task_id == "t1" else super().episode(task)

    environment = Environment(place="step", act=lambda: released.wait(60))
    play(environment, says("yes"), store, events, machine=IMPATIENT)
    assert not closed.is_set()
    released.set()
    assert closed.wait(10)


async def test_cancelled_run_does_not_wait_for_stuck_calls(store, events):
    released, entered = threading.Event(), threading.Event()

    def block() -> None:
        entered.set()
        released.wait(60)

    environment = Hostile(place="step", act=block)
    running = asyncio.create_task(collecting(environment, says("yes"), store, events))
    assert await asyncio.to_thread(entered.wait, 20)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not released.is_set()
    released.set()


def test_ended_event_loop_affects_no_other_episode(store, events):
    saved: list[Any] = []

    async def leaves_one(episode: CountingEpisode) -> None:
        async def exits() -> None:
            raise SystemExit(4)

        saved.append(asyncio.ensure_future(exits()))
        await asyncio.sleep(0.01)

    outputs = play(Counting(reset=leaves_one), says("yes"), store, events)
    assert len(outputs.trajectories) == 4


@pytest.mark.parametrize("text", ["\ud800", "red \udfff", 7, None, b"red"])
def test_undecodable_completion_fails_only_its_rollout(text, store, events, tmp_path):
    def change(completion: Any) -> Any:
        return replace(completion, text=text) if completion.text == "no" else completion

    policy = ScriptedPolicy(lambda messages, seed: "no" if seed % 2 else "yes", change=change)
    outputs = play(Counting(turns=1), policy, store, events)
    assert len(outputs.trajectories) == 2 == len(outputs.failures)
    assert set(outputs.drops) <= {"bad_text", "environment_error"}
    write_rollouts(tmp_path, outputs)
    assert len(read_rollouts(tmp_path).trajectories) == 2


def test_full_context_keeps_the_earned_reward(store, events):
    """A policy that writes too much is truncated; only a task that never fits is a failure."""

    def talks(messages: Any, seed: int) -> str:
        if len(messages) > 2:
            raise GenerationFailure("too long", reason="prompt_too_long")
        return "yes"

    outputs = play(Counting(turns=3), talks, store, events)
    assert outputs.failures == () and all(trajectory.truncated for trajectory in outputs.trajectories)
    assert [len(trajectory.turns) for trajectory in outputs.trajectories] == [1] * 4
    assert {trajectory.reward for trajectory in outputs.trajectories} == {2.0 + 1.5}


@pytest.mark.parametrize("written", [True, False])
def test_reserved_token_fails_the_rollout_unless_sampled(written, store, events):
    """In the second turn's prompt: the policy's own words end the episode, the environment's are a failure."""

    def talks(messages: Any, seed: int) -> str:
        if len(messages) > 2:
            raise ReservedToken("<|image_pad|>")
        return "yes <|image_pad|>" if written else "yes"

    outputs = play(Counting(turns=3), talks, store, events)
    if written:
        assert outputs.failures == () and [len(each.turns) for each in outputs.trajectories] == [1] * 4
    else:
        assert outputs.trajectories == () and outputs.drops == {"reserved_token": 4}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_turns", 0),
        ("max_turns", True),
        ("max_turns", "3"),
        ("max_turns", 10**9),
        ("name", None),
        ("name", "\ud800"),
        ("system_prompt", 7),
        ("system_prompt", "\ud800"),
        ("dialogue", "yes"),
    ],
)
def test_environment_without_properties_ends_the_call(name, value, store, events):
    environment = Counting()
    setattr(environment, name, value)
    with pytest.raises(ConfigurationError) as caught:
        play(environment, says("yes"), store, events)
    assert caught.value.where == f"{Counting.__module__}.Counting"


@pytest.mark.parametrize("weights", [None, 7, {"yes": "1"}, {"yes": float("nan")}, Endless(), {7: 1.0}, {}])
def test_invalid_reward_weights_fail_rollouts(weights, store, events):
    environment = Counting()
    environment.reward_weights = weights
    outputs = play(environment, says("yes"), store, events)
    assert len(outputs.failures) == 4 and set(outputs.drops) <= REASONS
