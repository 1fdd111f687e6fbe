"""Metrics of a step's rollouts and of CPU time, and a warning if nothing can be learned from rollouts."""

from __future__ import annotations

import reprlib
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import psutil

from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.rollouts.batches.advantages import turn_advantages
from armature.components.rollouts.settings import BatchSettings

Thread = tuple[int, int]
"""A thread, as the PID of its process and its thread id."""


class CpuTimes:
    """Measures CPU time of this process and all its child processes between calls of `since`.

    The numbers are from Linux's scheduler (`schedstat`); on other systems there are none.
    """

    def __init__(self) -> None:
        self._before = _thread_times()

    def since(self) -> dict[str, float]:
        """Return CPU times since the last call, summed over threads; threads that have ended are not counted.

        `timing/cpu` is the time on a CPU, `timing/cpu_wait` the time that runnable threads waited for one, in seconds.
        """
        before, self._before = self._before, _thread_times()
        pairs = [(times, before.get(thread, (0, 0))) for thread, times in self._before.items()]
        if not pairs:
            return {}
        ran, waited = (sum(now[part] - then[part] for now, then in pairs) / 1e9 for part in (0, 1))
        return {"timing/cpu": ran, "timing/cpu_wait": waited}


def _thread_times() -> Mapping[Thread, tuple[int, int]]:
    """Return two times in nanoseconds for each thread: how long it ran, and how long it waited for a CPU."""
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


def rollout_metrics(outputs: GenerateOutputs, environments: Collection[str] = ()) -> dict[str, float]:
    """Return metrics of rollouts: rewards, lengths in tokens, times in seconds, truncation and failures.

    Rewards and their parts are means over rollouts; a part that a rollout does not have counts as 0.

    Args:
        environments: names of a mixture's environments. Each also has the mean reward and the number of its rollouts.
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
        "samples": float(np.mean([trajectory.samples for trajectory in outputs.trajectories])),
        "truncated/length": float(np.mean([turn.finish_reason == "length" for turn in turns])),
        "truncated/turns": float(np.mean([trajectory.truncated for trajectory in outputs.trajectories])),
        "actions/format_defect": float(np.mean([turn.action_defect == "format" for turn in turns])),
        "actions/inadmissible": float(np.mean([turn.action_defect == "inadmissible" for turn in turns])),
        "timing/generate_mean": float(np.mean([turn.generate_seconds for turn in turns])),
    }
    rewarded: dict[str, list[float]] = defaultdict(list)
    for trajectory in outputs.trajectories:
        if trajectory.environment in environments:
            rewarded[trajectory.environment].append(trajectory.reward)
    return merged(
        counts=counts,
        failures=failures,
        rollouts=rollouts,
        tools=_tool_metrics(outputs.trajectories),
        parts=metrics_below("reward_parts", parts),
        rewards_of=metrics_below("reward_of", {name: float(np.mean(each)) for name, each in rewarded.items()}),
        rollouts_of=metrics_below("rollouts_of", {name: len(each) for name, each in rewarded.items()}),
    )


def _tool_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return metrics of tool calls; empty if there are none.

    They are the share of rollouts in which a tool returned something, calls of a rollout, and the share of calls with
    each status and of each tool.
    """
    called = [[call for turn in one.turns for call in turn.tool_calls] for one in trajectories]
    calls = [call for each in called for call in each]
    if not calls:
        return {}
    used = sum(any(call.status in ("ok", "program") for call in each) for each in called)
    statuses = Counter(call.status for call in calls)
    names = Counter(call.name for call in calls if call.status not in ("malformed", "unknown"))
    return merged(
        rollouts={"tools/used": used / len(called), "tools/calls": len(calls) / len(called)},
        statuses=metrics_below("tool_status", {name: count / len(calls) for name, count in statuses.items()}),
        names=metrics_below("tool_of", {name: count / len(calls) for name, count in names.items()}),
    )


def no_signal(trajectories: Sequence[Trajectory], settings: BatchSettings) -> str | None:
    """Return a warning if no turn of any group has an advantage, so that no weight would change; else None.

    Raises:
        ConfigurationError: the advantage is GiGPO, but no turn has a state to compare.
    """
    groups = {trajectory.group_id for trajectory in trajectories}
    if not groups or groups - turn_advantages(trajectories, settings).without_gradient:
        return None
    rewards = {trajectory.reward for trajectory in trajectories}
    earned = f"each earned {min(rewards):g}" if len(rewards) == 1 else "members of a group all earned the same"
    answer = reprlib.repr(trajectories[0].turns[-1].completion) if trajectories[0].turns else "nothing"
    return (
        f"warning: nothing could be learned from these {len(trajectories)} rollouts of {len(groups)} groups: {earned}. "
        f"The first one ended with {answer}. As long as this is so, rewards do not change the weights: check that such "
        "answers can earn the reward, and that the tasks are neither too hard nor too easy"
    )
