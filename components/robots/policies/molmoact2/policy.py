"""MolmoAct2 as a `RobotPolicy`: predict chunks of actions, in the dataset's units, from observations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from armature.components.contracts.errors import ServerError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.inputs import in_threads
from armature.components.robots.policies.molmoact2.modeling.losses import InferencePlan
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.sampling import Sampler
from armature.components.robots.policies.norm_stats import Floats
from armature.components.robots.policies.player import FlowPolicy, TokenChunk

TOKENS_PER_ACTION = 16
"""Largest number of generated tokens for each action of a chunk; the same limit as in LeRobot."""


class MolmoAct2Policy(FlowPolicy):
    """A MolmoAct2 model with its processor; see `FlowPolicy`.

    undecoded: number of predictions in discrete mode whose tokens were invalid. As in LeRobot, the robot gets the
        middle of each dimension's range instead.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
        >>> from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
        >>> from armature.components.robots.policies.norm_stats import (
        ...     FeatureNormStats, RobotMetadata)
        >>> from armature.components.robots.policies.settings import RobotPolicySettings, TinyPolicySettings
        >>> stats = FeatureNormStats(min=(0, 0), max=(1, 1), q01=(0, 0), q99=(1, 1), names=("x", "y"))
        >>> robot = RobotMetadata(action_stats=stats, state_stats=stats)
        >>> settings = RobotPolicySettings(tiny=TinyPolicySettings(), chunk_size=10, n_action_steps=5)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     loaded = load_policy(make_tiny_policy(Path(folder) / "checkpoint", settings), settings, robot)
        >>> policy = MolmoAct2Policy(loaded.model, loaded.processor(), loaded.settings, "continuous", rows=1)
        >>> image, state = np.zeros((84, 84, 3), np.uint8), np.zeros(2, np.float32)
        >>> policy.predict([RobotObservation({"camera": image}, state, "open the drawer")], seeds=[0]).shape
        (1, 5, 2)
    """

    FACTS = ("semantics", "action_mode", "chunk_size", "setup_type", "control_mode", "norm_tag", "dtype")
    _sampler: Sampler

    def _make_sampler(self, model: MolmoAct2, rows: int) -> Sampler:
        settings, processor = self._settings, self._processor
        plan, pad_id = InferencePlan.of(settings, model.config), processor.vocabulary.pad
        return Sampler(model, plan, settings.chunk_size, group=rows, width=processor.budget, pad_id=pad_id)

    @property
    def most_previous_actions(self) -> int:
        """Largest number of `PreviousActions` that a prediction can continue; 0 in discrete mode, which cannot."""
        return 0 if self._mode == "discrete" else self._settings.chunk_size

    @property
    def _max_tokens(self) -> int:
        return TOKENS_PER_ACTION * self._settings.chunk_size

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Floats:
        """Predict chunks, row i from observation i and seed i: (N, n_action_steps, action dimensions) float32."""
        if self._mode == "continuous":
            return super().predict(observations, seeds)
        examples = in_threads(self._example, observations)
        chunks, _ = self._decoded(self._sampler.generate(examples, self._max_tokens))
        return self._processor.decode(chunks)[:, : self.n_action_steps]

    def sample_action_tokens(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], temperature: float
    ) -> list[TokenChunk]:
        """Predict chunks by sampling action tokens, row i from seed i alone."""
        examples = in_threads(self._example, observations)
        sampled = self._sampler.sample_tokens(examples, seeds, self._max_tokens, temperature)
        chunks, decoded = self._decoded([each.tokens for each in sampled])
        actions = self._processor.decode(chunks)[:, : self.n_action_steps]
        return [
            TokenChunk(
                actions=actions[row],
                tokens=np.array(each.tokens, np.int32),
                logprobs=np.array(each.logprobs),
                decoded=decoded[row],
                value=each.value,
            )
            for row, each in enumerate(sampled)
        ]

    def facts(self) -> dict[str, Any]:
        """Return the settings that describe this policy to a reader of logs, reports and the server's metadata."""
        more = {"quantization": self._sampler.model.quantization, "undecoded_answers": self.undecoded}
        return super().facts() | more

    def _decoded(self, tokens: Sequence[Sequence[int]]) -> tuple[Floats, list[bool]]:
        """Decode the generated tokens of each row to normalized actions, (N, chunk_size, action dimensions).

        The second result has True for each row with valid tokens. Other rows get 0 for all actions.

        Raises:
            ServerError: tokens are invalid and `refuse_undecoded` is set.
        """
        decoded = [self._processor.decode_tokens(ids) for ids in tokens]
        undecoded = [each for each in decoded if each.actions is None]
        self.undecoded += len(undecoded)
        if undecoded and self._refuse_undecoded:
            raise ServerError(
                f"the policy's action tokens cannot be decoded: {undecoded[0].error}",
                code="undecodable_actions",
                remedy="train the policy longer, or predict by flow matching if it was trained for both",
            )
        middle = np.zeros((self._settings.chunk_size, self.action_dimensions), np.float32)
        chunks = np.stack([middle if each.actions is None else each.actions for each in decoded])
        return chunks, [each.actions is not None for each in decoded]
