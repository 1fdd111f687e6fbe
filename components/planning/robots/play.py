"""Episodes on the virtual clock: simulators in processes, and a policy that answers who waits, as `Collector` has them.

Who plays what, and where, is decided by the real schedule; the threads of players are coroutines here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from math import ceil

from armature.components.environments.libero.tasks import LiberoTask
from armature.components.evaluation.libero.run import task_of
from armature.components.evaluation.libero.schedule import PlannedEpisode, TaskKey
from armature.components.planning.clock import SerialResource
from armature.components.planning.robots.costs import RobotCosts, SimulatorCosts
from armature.components.planning.robots.workload import RobotEpisode
from armature.components.workers.pool import StickyQueue


class SimulatedArena(SerialResource):
    """A process with simulators by slot."""

    def __init__(self, costs: SimulatorCosts) -> None:
        super().__init__()
        self._costs = costs
        self._built: dict[int, LiberoTask] = {}

    def reset(self, task: LiberoTask, slot: int) -> Awaitable[None]:
        stays, self._built[slot] = self._built.get(slot) == task, task
        return self.use(self._costs.reset_seconds if stays else self._costs.build_seconds)

    def step(self, actions: int) -> Awaitable[None]:
        return self.use(actions * self._costs.action_seconds)


class SimulatedPolicy:
    """Answers those that wait, as `InferenceQueue` does. `busy`: seconds so far, `answers`: how many."""

    def __init__(self, costs: RobotCosts) -> None:
        self._costs = costs.policy
        self.busy, self.answers = 0.0, 0

    async def serve(self, questions: asyncio.Queue[asyncio.Future[None] | None], players: int) -> None:
        """Until all players have left, which they say by None."""
        clock = asyncio.get_running_loop().time
        patience = 0.0
        while players:
            waiting, latest, others = list[asyncio.Future[None]](), clock() + patience, False
            while len(waiting) < min(self._costs.rows, players):
                try:
                    async with asyncio.timeout_at(latest if others else None):
                        found = await questions.get()
                except TimeoutError:
                    break
                others = True
                if found is None:
                    players -= 1
                else:
                    waiting.append(found)
            if not waiting:
                continue
            seconds, patience = self._costs.pass_seconds, self._costs.pass_seconds / 2
            self.busy, self.answers = self.busy + seconds, self.answers + len(waiting)
            await asyncio.sleep(seconds)
            for answer in waiting:
                answer.set_result(None)


class SimulatedPlay:
    """Plays episodes as `Collector` and `Evaluation` do."""

    def __init__(self, costs: RobotCosts, processes: int) -> None:
        self._costs = costs
        self.arenas = [SimulatedArena(costs.simulators) for _ in range(processes)]
        self.policy = SimulatedPolicy(costs)
        self._held: dict[tuple[int, int], TaskKey] = {}
        """As `Collector` has it, by process and slot."""

    async def play(
        self,
        planned: Sequence[PlannedEpisode],
        episode_of: Callable[[int], RobotEpisode],
        batch: int,
        chunk: int,
        bootstrap: bool = False,
        kept: bool = True,
    ) -> None:
        """Return once all are played, `batch` at once, with an answer for every `chunk` actions.

        Args:
            episode_of: what becomes of the number in `planned`.
            bootstrap: the policy is asked once more after an episode that failed.
            kept: as `Collector` plays: answers are written to the store after each episode, and who has a simulator
                begins with its task; else as `Evaluation` does.
        """
        questions: asyncio.Queue[asyncio.Future[None] | None] = asyncio.Queue()
        count, held = min(batch, len(planned)), self._held if kept else {}
        slots = [(i % len(self.arenas), i // len(self.arenas)) for i in range(count)]
        before = [held[slot] for slot in slots if slot in held]
        schedule = StickyQueue(range(len(planned)), lambda number: task_of(planned[number]), before)

        async def asked() -> None:
            answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            questions.put_nowait(answer)
            await answer

        async def player(simulator: tuple[int, int]) -> None:
            arena, slot = self.arenas[simulator[0]], simulator[1]
            while (number := schedule.take(held.get(simulator))) is not None:
                held[simulator], episode = task_of(planned[number]), episode_of(number)
                await arena.reset(planned[number].task, slot)
                answers = ceil(episode.actions / chunk)
                for done in range(0, episode.actions, chunk):
                    await asked()
                    await arena.step(min(chunk, episode.actions - done))
                if bootstrap and not episode.solved:
                    await asked()
                await asyncio.sleep(kept * answers * self._costs.flow.answer_seconds)
            questions.put_nowait(None)

        await asyncio.gather(self.policy.serve(questions, len(slots)), *map(player, slots))
