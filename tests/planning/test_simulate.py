"""The simulated loop against formulas by hand, and against a benchmark of the real one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

from armature.components.batches.settings import BatchSettings
from armature.components.inference.merge import WINDOW
from armature.components.planning.clock import VirtualLoop
from armature.components.planning.costs import Costs, FailureCosts, FlowCosts, ServerCosts, TrainerCosts
from armature.components.planning.pool import SimulatedPool
from armature.components.planning.simulate import SimulatedRun
from armature.components.planning.walls import WALLS, first_wall
from armature.components.planning.workload import PlannedTurn, Workload
from armature.components.rollouts.settings import RolloutSettings
from armature.components.vlm.settings import TrainerSettings

GROUPS, SIZE, PROMPT, ANSWER = 4, 8, 100, 50
EPISODE = (PlannedTurn(PROMPT, PROMPT, ANSWER, 1, 0.5),)
COSTS = Costs(
    servers=ServerCosts(pass_seconds=0.01, token_seconds=1e-4),
    trainer=TrainerCosts(token_seconds=1e-3, update_seconds=0.25),
    flow=FlowCosts(request_seconds=0.0, rollout_seconds=0.01),
    sync_seconds=0.75,
)


def make_run(episodes: Sequence[Any] = (EPISODE,), **changes: Any) -> SimulatedRun:
    plan = {"groups_per_step": GROUPS, "group_size": SIZE, "sampling": {"max_tokens": ANSWER}}
    settings = RolloutSettings.model_validate(plan | changes.pop("rollouts", {}))
    run = SimulatedRun(
        rollouts=settings,
        batches=BatchSettings(max_sequence_tokens=4096),
        trainer=TrainerSettings(learning_rate=1e-3, max_steps=99, save_every=99, max_tokens_per_micro_batch=600),
        costs=COSTS,
        workload=Workload((tuple(episodes),), False, 0.0, "by hand"),
        servers=1,
        ranks=2,
        max_concurrent=GROUPS * SIZE,
    )
    return replace(run, **changes)


def hand_rollouts(costs: Costs = COSTS) -> float:
    """All are alike: the environment, the window of merging, each group's prompt once, then tokens of all at once."""
    server = costs.servers
    prompts = GROUPS * PROMPT * server.token_seconds
    return 0.5 + WINDOW + prompts + ANSWER * (server.pass_seconds + GROUPS * SIZE * server.token_seconds)


ROLLOUTS = hand_rollouts()
BATCH = GROUPS * SIZE * 0.01
TRAIN = 4 * 4 * (PROMPT + ANSWER) * 1e-3 + 0.25
"""32 rows of 150 tokens are 8 micro-batches of 4 rows: 4 rounds of 2 ranks."""
SYNC = 0.75


def test_in_turn_a_step_is_the_sum_of_its_parts() -> None:
    found = make_run().simulate()
    assert found.step_seconds == pytest.approx(ROLLOUTS + BATCH + TRAIN + SYNC, rel=1e-6)
    assert found.timings["timing/wait_for_rollouts"] == pytest.approx(ROLLOUTS, rel=1e-6)
    assert found.timings["timing/train"] == pytest.approx(TRAIN, rel=1e-6)
    assert found.trainer_share == pytest.approx(TRAIN / found.step_seconds, rel=1e-6)
    assert found.server_share == pytest.approx((ROLLOUTS - 0.5 - WINDOW) / found.step_seconds, rel=1e-6)


@pytest.mark.parametrize("token_seconds", [1e-4, 1e-2])
def test_one_step_ahead_the_longer_of_the_two_counts(token_seconds: float) -> None:
    costs = COSTS.replaced({"trainer": {"token_seconds": token_seconds}}, "by hand")
    found = make_run(rollouts={"max_staleness": 1}, costs=costs).simulate()
    train = 4 * 4 * (PROMPT + ANSWER) * token_seconds + 0.25
    assert found.step_seconds == pytest.approx(max(ROLLOUTS, BATCH + train) + SYNC, rel=1e-6)


@pytest.mark.parametrize("staleness", [1, 2, 4])
@pytest.mark.parametrize("seconds", [0.5, 40.0])
def test_updates_in_flight_let_the_steps_of_a_cycle_share_their_rollouts(staleness: int, seconds: float) -> None:
    """Rollouts of step k begin with version k - 1 - staleness; a step trains once they and the step before are done."""
    costs = COSTS.replaced({"servers": {"pass_seconds": 0.0, "token_seconds": 0.0}, "sync_seconds": 0.0}, "by hand")
    run = make_run(
        [(PlannedTurn(PROMPT, PROMPT, ANSWER, 1, seconds),)],
        rollouts={"max_staleness": staleness, "in_flight_updates": True},
        costs=costs,
        max_concurrent=10_000,
        steps=staleness + 1,
    )
    rest = BATCH + TRAIN
    assert run.simulate().step_seconds == pytest.approx(
        max(rest, (seconds + WINDOW + rest) / (staleness + 1)), rel=1e-6
    )


def test_weights_in_flight_do_not_wait_for_long_answers() -> None:
    """A step of one group whose answers outlast the training of the step before: a sync costs its seconds and contexts
    that are computed again, not the rest of an answer."""
    costs = COSTS.replaced({"servers": {"pass_seconds": 1.0, "token_seconds": 0.0}, "sync_seconds": 2.0}, "by hand")
    plan = {"max_staleness": 2, "in_flight_updates": True, "groups_per_step": 1}
    found = make_run(rollouts=plan, costs=costs, max_concurrent=10_000, steps=9).simulate()
    assert found.timings["timing/sync"] == pytest.approx(2.0)
    assert found.step_seconds < ANSWER


def test_the_event_loop_of_the_flow_is_a_wall() -> None:
    costs = COSTS.replaced({"flow": {"request_seconds": 0.5, "image_seconds": 0.1}}, "by hand")
    found = make_run(costs=costs).simulate()
    serial = GROUPS * (SIZE * 0.5 + 0.1)
    assert found.flow_share == pytest.approx(serial / found.step_seconds, rel=1e-6)
    assert found.timings["timing/wait_for_rollouts"] >= 0.5 + WINDOW + serial


def uneven(staleness: int, seed: int = 0) -> SimulatedRun:
    """As in the benchmark `in_flight`: 64 episodes a step, 16 at once; one in 8 takes 6 s, others 0.2 s."""
    episodes = [(PlannedTurn(23, 23, 2, 1, 0.2 if index % 8 else 6.0),) for index in range(8)]
    costs = COSTS.replaced(
        {
            "trainer": {"token_seconds": 1e-5, "update_seconds": 0.3},
            "sync_seconds": 0.3,
            "flow": {"rollout_seconds": 0},
        },
        "by hand",
    )
    plan = {"groups_per_step": 16, "group_size": 4, "max_staleness": staleness, "in_flight_updates": staleness > 1}
    workload = Workload((episodes,), False, 0.0, "by hand", seed)
    return make_run(rollouts=plan, costs=costs, workload=workload, max_concurrent=16, steps=12)


@pytest.mark.parametrize(("staleness", "measured"), [(0, 7.51), (1, 6.15), (4, 3.78)])
def test_steps_of_uneven_episodes_take_as_long_as_in_the_benchmark(staleness: int, measured: float) -> None:
    """docs/benchmarks.md, "Uneven episodes": means of steps 3 to 8 of three runs; here of five."""
    runs = [uneven(staleness, seed).simulate(last=8).every[2:] for seed in range(5)]
    assert fmean(map(fmean, runs)) == pytest.approx(measured, rel=0.1)


def test_updates_in_flight_gain_at_least_half_with_uneven_episodes() -> None:
    in_turn, ahead, in_flight = (uneven(staleness).simulate().step_seconds for staleness in (0, 1, 4))
    assert in_turn / in_flight >= 1.5
    assert in_flight < ahead < in_turn


def test_the_same_seed_gives_the_same_run() -> None:
    assert uneven(4).simulate() == uneven(4).simulate()


@pytest.mark.parametrize("resumes_alone", [True, False])
def test_failures_cost_time_and_lose_no_rollout(resumes_alone: bool) -> None:
    trainer = TrainerSettings(learning_rate=1e-3, max_steps=99, save_every=1, max_tokens_per_micro_batch=600)
    sound = make_run(servers=4, steps=30, trainer=trainer)
    failures = FailureCosts(hours_between=0.02, server_restart_seconds=20, trainer_restart_seconds=5)
    failing = COSTS.model_copy(update={"failures": failures})
    found = replace(sound, costs=failing, resumes_alone=resumes_alone).simulate()
    assert found.server_failures > 0 and found.trainer_failures > 0
    assert found.samples_per_step == GROUPS * SIZE
    assert found.step_seconds > 1.05 * sound.simulate().step_seconds


class Deaths:
    """In place of a random generator: each of the servers dies after so many seconds, and once."""

    def __init__(self, *after: float) -> None:
        self._after = iter(after)

    def exponential(self, _: float) -> float:
        return next(self._after, 1e9)


@pytest.mark.parametrize(("servers", "waits", "lost"), [(2, True, 0), (1, False, 1)])
def test_a_server_that_dies_waits_for_the_next_sync_unless_it_was_the_last(
    servers: int, waits: bool, lost: int
) -> None:
    failures = FailureCosts(hours_between=1.0, server_restart_seconds=20)
    pool = SimulatedPool(COSTS.model_copy(update={"failures": failures}), servers, 8, resumes_alone=False)
    loop = VirtualLoop()
    pool.fail(1.0, loop, Deaths(10.0))  # type: ignore[arg-type]
    first = pool._replicas[0]
    loop.wait(29.0)
    assert not (first.ready or first.waits)
    loop.wait(2.0)
    assert (first.waits, first.ready, pool.lost) == (waits, not waits, lost)
    loop.run_until_complete(pool.sync())
    assert first.ready and not first.waits
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.wait(0.0)
    loop.close()


SLOW_ENVIRONMENT = (PlannedTurn(PROMPT, PROMPT, 1, 1, 20.0),)
NO_BATCH = COSTS.replaced({"flow": {"rollout_seconds": 0.0}, "sync_seconds": 0.0}, "")


@pytest.mark.parametrize(
    ("changes", "wall"),
    [
        ({"max_concurrent": 4, "costs": NO_BATCH}, "too few environments at once"),  # 8 rounds of 20 s
        ({"costs": NO_BATCH}, "too few groups in a step"),  # one round: all GPUs wait for the environment
        ({"costs": NO_BATCH.replaced({"sync_seconds": 90.0}, "")}, "sync of weights"),
    ],
)
def test_the_first_wall_is_what_a_rollout_costs_least_without(changes: dict[str, Any], wall: str) -> None:
    run = make_run((SLOW_ENVIRONMENT,), **changes)
    name, gain = first_wall(run, run.simulate(), WALLS)
    assert name == wall and 0.4 < gain < 1
