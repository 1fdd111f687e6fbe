"""Recording of an episode: the policy's observations and action chunks as rows of the rollout table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from armature.components.artifacts.images import ImageStore, encode_png
from armature.components.contracts.images import ImageRef
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.evaluation.episode import Actions, PlayedEpisode
from armature.components.robots.evaluation.schedule import PlannedEpisode
from armature.components.robots.policies.player import FlowChunk, PlainChunk, TokenChunk
from armature.components.robots.rl.schedule import episode_ids
from armature.components.robots.rl.table import ActionChunk

PredictedChunk = PlainChunk | FlowChunk | TokenChunk


class ActionChunkRecorder:
    """Actor that plays one attempt at an episode and records it.

    Images are encoded while the policy computes.

    Args:
        predict: asks the policy for the chunk of an observation, given the chunk's number in the episode.
    """

    def __init__(self, predict: Callable[[RobotObservation, int], Future[PredictedChunk]]) -> None:
        self._predict = predict
        self._recorded: list[tuple[RobotObservation, list[tuple[ImageRef, bytes]], PredictedChunk]] = []

    def __call__(self, observation: RobotObservation, chunk: int) -> Actions:
        coming = self._predict(observation, chunk)
        seen = [_encoded(observation.images[name]) for name in _cameras(observation)]
        answer = coming.result()
        self._recorded.append((observation, seen, answer))
        return answer.actions

    def rows(
        self,
        planned: PlannedEpisode,
        episode: PlayedEpisode,
        step: int,
        version: int,
        images: ImageStore,
        last_value: float | None,
        reward: Callable[..., list[float]],
    ) -> list[ActionChunk]:
        """Return one row per chunk, in order, and put their images into the store.

        Args:
            last_value: for an episode that is bootstrapped, the result of `value_after`; None: not bootstrapped.
            reward: `chunk_rewards` with its arguments `reward` and `gamma` already bound.
        """
        rewards = reward(len(self._recorded), episode.progress, episode.success, goes_on=last_value is not None)
        group_id, episode_id = episode_ids(step, planned)
        rows, done = [], 0
        images.keep({ref: data for _, seen, _ in self._recorded for ref, data in seen})
        for chunk, (observation, seen, answer) in enumerate(self._recorded):
            executed = min(len(answer.actions), episode.steps - done)
            done += executed
            last = chunk == len(self._recorded) - 1
            rows.append(
                ActionChunk(
                    group_id=group_id,
                    episode_id=episode_id,
                    suite=planned.task.suite,
                    task=planned.task.index,
                    language=observation.task,
                    initial_state=planned.initial_state,
                    perturbation=planned.perturbation.label if planned.perturbation else "",
                    chunk=chunk,
                    policy_version=version,
                    cameras=_cameras(observation),
                    images=tuple(ref for ref, _ in seen),
                    state=observation.state,
                    **_drawn(answer, executed),
                    actions=answer.actions[:executed].reshape(-1),
                    executed=executed,
                    reward=rewards[chunk],
                    done=last,
                    truncated=last and not episode.success,
                    value=answer.value,
                    last_value=(last_value or 0.0) if last else 0.0,
                )
            )
        return rows

    def value_after(self, episode: PlayedEpisode) -> float:
        """Return the value of the episode's last observation. This asks the policy, which must have a value head."""
        value = self._predict(episode.last, len(self._recorded)).result().value
        assert value is not None
        return value


def _cameras(observation: RobotObservation) -> tuple[str, ...]:
    return tuple(sorted(observation.images))


def _encoded(pixels: NDArray[np.uint8]) -> tuple[ImageRef, bytes]:
    image = encode_png(Image.fromarray(pixels))
    height, width, _ = pixels.shape
    return ImageRef(image.sha256, image.media_type, width, height), image.data


def episode_defect(rows: Sequence[ActionChunk]) -> tuple[str, str] | None:
    """Check an episode's log-probs, rewards and values.

    Returns:
        For the first number that is not finite, a reason code of `contracts.errors` and a message with the numbers;
        None if the episode can be trained on.
    """
    for each in rows:
        values = (each.value or 0.0, each.last_value)
        for reason, numbers in (("bad_logprobs", each.logprobs), ("bad_reward", [each.reward]), ("bad_value", values)):
            if not np.isfinite(numbers).all():
                return reason, f"chunk {each.chunk} has {[*numbers][:8]}"
    return None


def _drawn(answer: PredictedChunk, executed: int) -> dict[str, Any]:
    """Return values for the columns of the rollout table that store what was sampled for a chunk, and the log-probs of
    it.

    Log-probs of continuous actions are kept only for the first `executed` actions, which the robot carried out.
    """
    nothing = np.zeros(0, np.float32)
    drawn: dict[str, Any] = {"before": nothing, "after": nothing, "flow_step": None, "decoded": True}
    drawn |= {"logprobs": nothing.astype(np.float64), "tokens": nothing.astype(np.int32)}
    if isinstance(answer, TokenChunk):
        drawn |= {"logprobs": answer.logprobs, "tokens": answer.tokens, "decoded": answer.decoded}
    elif isinstance(answer, FlowChunk):
        drawn |= {"before": answer.before.reshape(-1), "after": answer.after.reshape(-1), "flow_step": answer.step}
        drawn |= {"logprobs": answer.logprobs[:executed].reshape(-1)}
    return drawn
