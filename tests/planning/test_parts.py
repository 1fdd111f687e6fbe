"""A server, a training step and drawn episodes against formulas by hand."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from armature.components.planning.clock import SerialResource, VirtualLoop
from armature.components.planning.costs import ServerCosts, TrainerCosts
from armature.components.planning.server import SimulatedServer
from armature.components.planning.trainer import PlannedRollout, samples_of, training_seconds
from armature.components.planning.workload import PlannedTurn, WorkloadSettings, drawn
from armature.components.rollouts.play import RolloutId
from armature.components.vlm.settings import TrainerSettings

SERVER = ServerCosts(pass_seconds=0.01, token_seconds=0.001, context_token_seconds=1e-6, slots=4)


def served(*requests: tuple[float, int, tuple[int, ...]]) -> list[float]:
    """When each request, which comes at a time with a prompt and samples, is answered."""
    loop = VirtualLoop()

    async def one(server: SimulatedServer, at: float, prompt: int, samples: tuple[int, ...]) -> float:
        await asyncio.sleep(at)
        await server.answer(prompt, prompt, samples)
        return loop.time()

    async def all_of_them() -> list[float]:
        server = SimulatedServer(SERVER)
        return await asyncio.gather(*(one(server, *request) for request in requests))

    try:
        return loop.run_until_complete(all_of_them())
    finally:
        loop.close()


def test_a_request_alone_takes_its_prompt_and_a_pass_for_each_token() -> None:
    assert served((0, 100, (20,))) == pytest.approx([0.1 + 20 * (0.01 + 0.001 + 110e-6)])


def test_samples_of_one_prompt_share_it_and_slow_each_other_down() -> None:
    assert served((0, 100, (20, 20))) == pytest.approx([0.1 + 20 * (0.01 + 2 * 0.001 + 220e-6)])


def test_a_prompt_that_comes_later_is_waited_for() -> None:
    alone, both = 0.01 + 0.001 + 110e-6, 0.01 + 0.002 + 220e-6
    done = 0.1 + 10 * alone  # of the first, when the second comes
    first, second = served((0, 100, (20,)), (done, 100, (20,)))
    assert first == pytest.approx(done + 0.1 + 10 * both)
    assert second == pytest.approx(first + 10 * alone)


def test_what_has_no_slot_waits_for_one() -> None:
    full = 4 * (0.01 + 4 * 0.001)
    times = served(*((0.0, 0, (4,)) for _ in range(8)))
    assert times[:4] == pytest.approx([full] * 4, rel=1e-2) and times[4:] == pytest.approx([2 * full] * 4, rel=1e-2)


def test_a_pause_stops_what_is_decoded_and_has_its_context_computed_again() -> None:
    async def run() -> float:
        server = SimulatedServer(SERVER)
        server.pause(5.0)  # nothing is asked
        asked = asyncio.create_task(server.answer(100, 100, (20,)))
        await asyncio.sleep(0.2)
        server.pause(3.0)
        await asked
        return asyncio.get_running_loop().time()

    loop = VirtualLoop()
    assert loop.run_until_complete(run()) == pytest.approx(0.1 + 20 * (0.01 + 0.001 + 110e-6) + 3.0 + 110 * 0.001)
    loop.close()


def test_what_does_one_thing_at_a_time_is_had_in_order() -> None:
    loop = VirtualLoop()

    async def use() -> list[float]:
        resource, times = SerialResource(), list[float]()

        async def one() -> None:
            await resource.use(2.0)
            times.append(loop.time())

        await asyncio.gather(one(), one(), one())
        return times

    assert loop.run_until_complete(use()) == [2.0, 4.0, 6.0]
    loop.close()


def rollouts(groups: int, size: int, prompt: int, answer: int) -> list[PlannedRollout]:
    episode = (PlannedTurn(prompt, prompt, answer, 1, 0.0),)
    return [PlannedRollout(str(index // size), episode) for index in range(groups * size)]


@pytest.mark.parametrize(("packing", "tokens"), [(False, 4 * 150), (True, 100 + 4 * 50)])
def test_a_round_takes_as_long_as_its_largest_micro_batch(packing: bool, tokens: int) -> None:
    """4 groups of 4 rows, a group in each micro-batch: packed, a group's prompt is computed once."""
    settings = TrainerSettings(
        learning_rate=1e-3, max_steps=1, packing=packing, max_rows_per_micro_batch=4, max_tokens_per_micro_batch=600
    )
    samples = samples_of(rollouts(4, 4, 100, 50), dialogue=False)
    costs = TrainerCosts(token_seconds=0.01, update_seconds=1.0)
    assert training_seconds(samples, settings, costs, 2) == pytest.approx(2 * tokens * 0.01 + 1)
    assert training_seconds(samples, settings, costs, 1024) == pytest.approx(150 * 0.01 + 1), "a row on each of 16"
    assert training_seconds(samples, settings, costs, 2, sharing=2) == pytest.approx(4 * tokens / 2 * 0.01 + 1)
    gathering = costs.model_copy(update={"gather_seconds": 30.0})
    assert training_seconds(samples, settings, gathering, 2) == pytest.approx(2 * 30 + 1)
    late = gathering.model_copy(update={"micro_batch_seconds": 3.0, "exposed_seconds": 0.5})
    assert training_seconds(samples, settings, late, 2) == pytest.approx(2 * (3 + 30 + 0.5) + 1)


def test_turns_of_a_dialogue_are_one_sample() -> None:
    episode = (PlannedTurn(100, 100, 20, 1, 0.0), PlannedTurn(170, 50, 30, 2, 0.0))
    lengths = [
        [len(sample.input_ids) for sample in samples_of([PlannedRollout("0", episode)], dialogue)]
        for dialogue in (True, False)
    ]
    assert lengths == [[200], [120, 200]]


def test_drawn_episodes_have_the_means_that_are_asked_for() -> None:
    settings = WorkloadSettings(
        turns=4.0, max_turns=50, dialogue=True, completion_tokens=100.0, environment_seconds=2.0, spread=0.5
    )
    workload = drawn(settings, max_tokens=10_000, seed=0, source="")
    episodes = workload.steps[0]
    turns = [turn for episode in episodes for turn in episode]
    assert len(turns) / len(episodes) == pytest.approx(4, rel=0.1)
    assert sum(turn.completion_tokens for turn in turns) / len(turns) == pytest.approx(100, rel=0.05)
    assert sum(turn.environment_seconds for turn in turns) / len(turns) == pytest.approx(2, rel=0.05)
    for episode in episodes[:50]:
        for before, turn in itertools.pairwise(episode):
            assert turn.prompt_tokens == before.prompt_tokens + before.completion_tokens + turn.new_tokens
    place = RolloutId(3, 1, 4)
    assert workload.episode(place) is workload.episode(place)
    alike = drawn(settings.model_copy(update={"spread": 0.0}), 10_000, 0, "").steps[0]
    assert set(alike) == {alike[0]} and len(alike[0]) == 4
