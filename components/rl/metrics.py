"""What the rollouts of one step say about the policy."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from armature.components.contracts.metrics import merged, metrics_below
from armature.components.contracts.rollouts import GenerateOutputs


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
