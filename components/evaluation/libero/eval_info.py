"""The evaluation as LeRobot writes it, for tools that read its `eval_info.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from armature.components.evaluation.libero.results import LiberoResult, by_suite, by_task
from armature.components.evaluation.libero.schedule import EpisodeKey

EVAL_INFO_FILE = "eval_info.json"

Videos = Mapping[EpisodeKey, str]


def video_path(key: EpisodeKey) -> str:
    """Where an episode's video lies in the output folder."""
    suite, task, episode, *perturbed = key
    return "/".join(["videos", f"{suite}_{task}", *perturbed, f"eval_episode_{episode}.mp4"])


def eval_info(results: Sequence[LiberoResult], videos: Videos, seconds: float) -> dict[str, Any]:
    """`per_task`, `per_group` (suites) and `overall`; `pc_success` is in percent.

    LIBERO rewards the step that solves the task with 1 and all others with 0, so an episode's sum and maximum
    are its success. seconds: of the whole evaluation, attempts before a resume not counted.
    """
    overall = _aggregate(results, videos) | {"eval_s": seconds, "eval_ep_s": seconds / max(len(results), 1)}
    return {
        "per_task": [
            {"task_group": suite, "task_id": task, "metrics": _per_episode(group, videos)}
            for (suite, task), group in by_task(results).items()
        ],
        "per_group": {suite: _aggregate(group, videos) for suite, group in by_suite(results).items()},
        "overall": overall,
    }


def _per_episode(results: Sequence[LiberoResult], videos: Videos) -> dict[str, Any]:
    rewards = [float(result.success) for result in results]
    return {
        "sum_rewards": rewards,
        "max_rewards": rewards,
        "successes": [result.success for result in results],
        "video_paths": _paths(results, videos),
    }


def _aggregate(results: Sequence[LiberoResult], videos: Videos) -> dict[str, Any]:
    rate = fmean(result.success for result in results)
    return {
        "avg_sum_reward": rate,
        "avg_max_reward": rate,
        "pc_success": 100.0 * rate,
        "n_episodes": len(results),
        "video_paths": _paths(results, videos),
    }


def _paths(results: Sequence[LiberoResult], videos: Videos) -> list[str]:
    return [videos[result.key] for result in results if result.key in videos]
