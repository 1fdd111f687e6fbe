"""What the rollouts of one step say about the policy."""

from __future__ import annotations

import reprlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.rollouts.batches.advantages import turn_advantages
from armature.components.rollouts.settings import BatchSettings

# How long the threads of a run computed, and how long they waited for a CPU that others had.

Thread = tuple[int, int]


class CpuTimes:
    """Counts for this process and all that it started, since it was asked before.

    Linux's scheduler counts both for every thread (`schedstat`); elsewhere nothing is said.
    """

    def __init__(self) -> None:
        self._before = _thread_times()

    def since(self) -> dict[str, float]:
        """`timing/cpu`: seconds on a CPU; `timing/cpu_wait`: ready to run, and waiting for one. Threads add up; those
        that ended meanwhile are not counted."""
        before, self._before = self._before, _thread_times()
        pairs = [(times, before.get(thread, (0, 0))) for thread, times in self._before.items()]
        if not pairs:
            return {}
        ran, waited = (sum(now[part] - then[part] for now, then in pairs) / 1e9 for part in (0, 1))
        return {"timing/cpu": ran, "timing/cpu_wait": waited}


def _thread_times() -> Mapping[Thread, tuple[int, int]]:
    """Nanoseconds that each thread ran, and waited."""
    times: dict[Thread, tuple[int, int]] = {}
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        for file in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = map(int, file.read_text().split())
            except (FileNotFoundError, ProcessLookupError):  # the thread has ended
                continue
            times[process.pid, int(file.parent.name)] = ran, waited
    return times


def rollout_metrics(outputs: GenerateOutputs) -> dict[str, float]:
    """Rewards, lengths, truncation and failures; times are seconds, lengths are tokens.

    Rewards and their parts are means over rollouts, where a part that a rollout lacks counts as 0.
    """
    planned = len(outputs.trajectories) + len(outputs.failures)
    counts = {"rollouts/planned": float(planned), "rollouts/failed": float(len(outputs.failures))}
    failures = metrics_below("failures", outputs.drops)
    if not outputs.trajectories:
        return merged(counts=counts, failures=failures)
    rewards = np.array([trajectory.reward for trajectory in outputs.trajectories])
    turns = [turn for trajectory in outputs.trajectories for turn in trajectory.turns]
    lengths = np.array([len(turn.completion_token_ids) for turn in turns])
    parts: dict[str, float] = defaultdict(float)
    for trajectory in outputs.trajectories:
        for name, value in trajectory.reward_parts.items():
            parts[name] += value / len(outputs.trajectories)
    rollouts = {
        "reward": float(rewards.mean()),
        "reward/rollout_std": float(rewards.std()),
        "tokens/completion": float(lengths.mean()),
        "tokens/completion_max": float(lengths.max()),
        "tokens/prompt": float(np.mean([len(turn.prompt_token_ids) for turn in turns])),
        "turns": len(turns) / len(outputs.trajectories),
        "truncated/length": float(np.mean([turn.finish_reason == "length" for turn in turns])),
        "truncated/turns": float(np.mean([trajectory.truncated for trajectory in outputs.trajectories])),
        "actions/format_defect": float(np.mean([turn.action_defect == "format" for turn in turns])),
        "actions/inadmissible": float(np.mean([turn.action_defect == "inadmissible" for turn in turns])),
        "timing/generate_mean": float(np.mean([turn.generate_seconds for turn in turns])),
    }
    return merged(counts=counts, failures=failures, rollouts=rollouts, parts=metrics_below("reward_parts", parts))


# Whether there is anything to learn from some rollouts.


def no_signal(trajectories: Sequence[Trajectory], settings: BatchSettings) -> str | None:
    """What to say where no turn of any group has an advantage, so that rewards would not change a weight; else None.

    Raises:
        ConfigurationError: GiGPO without any state to compare turns at.
    """
    groups = {trajectory.group_id for trajectory in trajectories}
    if not groups or groups - turn_advantages(trajectories, settings).without_gradient:
        return None
    rewards = {trajectory.reward for trajectory in trajectories}
    earned = f"each earned {min(rewards):g}" if len(rewards) == 1 else "members of a group all earned the same"
    answer = reprlib.repr(trajectories[0].turns[-1].completion) if trajectories[0].turns else "nothing"
    return (
        f"warning: nothing could be learned from these {len(trajectories)} rollouts of {len(groups)} groups: {earned}. "
        f"The first ended with {answer}. While that is so, no step changes the weights by rewards: see whether the "
        "reward can be earned by such answers, and whether the tasks are too hard or too easy"
    )
