"""MolmoAct2 as a `RobotPolicy`: predict chunks of actions, in the dataset's units, from observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError, ServerError
from armature.components.contracts.robots import PreviousActions, RobotObservation
from armature.components.robots.policies.flow import prefix_weights
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import fill_model, load_policy
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.batch import Example, Floats
from armature.components.robots.policies.molmoact2.processing.processor import Processor, in_threads
from armature.components.robots.policies.molmoact2.sampling import InferencePlan, Sampler, ScoredChunks
from armature.components.robots.policies.settings import Quantization, RobotPolicySettings
from armature.components.robots.policies.source import refuse_short_chunk

InferenceMode = Literal["continuous", "discrete"]
TOKENS_PER_ACTION = 16
"""Largest number of generated tokens for each action of a chunk; the same limit as in LeRobot."""


class InferenceChanges(TypedDict, total=False):
    """Settings that replace the policy's own settings at inference; None keeps the policy's own value."""

    n_action_steps: int | None
    num_inference_steps: int | None
    image_attention: Literal["bidirectional", "as_trained"] | None


@dataclass(frozen=True)
class EncodedObservation(RobotObservation):
    """An observation with the `example` that the policy's processor has encoded."""

    example: Example = field(kw_only=True)


@dataclass(frozen=True)
class PlainChunk:
    """A predicted chunk without log-probs: (n_action_steps, action dimensions) float32 in the dataset's units."""

    actions: Floats
    value: None = None


@dataclass(frozen=True)
class FlowChunk:
    """A predicted chunk with log-probs of one random Flow-SDE step, or with flow-matching losses in place of log-probs.

    actions: (n_action_steps, action dimensions) float32 in the dataset's units.
    before, after: points before and after the random step `step`, (T, max_action_dim) float32. If `step` is None, the
        noise of the losses, (F, T, max_action_dim), and the normalized actions, (T, max_action_dim).
    logprobs: (n_action_steps, action dimensions) float64, one for each number of `after`.
    value: output of the value head; None without a value head.
    """

    actions: Floats
    before: Floats
    after: Floats
    step: int | None
    logprobs: NDArray[np.float64]
    value: float | None


@dataclass(frozen=True)
class TokenChunk:
    """A predicted chunk with its sampled action tokens.

    actions: (n_action_steps, action dimensions) float32 in the dataset's units; the middle of each dimension's range
        if the tokens are invalid.
    tokens: (K,) int32, EOS included. logprobs: (K,) float64.
    decoded: True if the tokens decode to actions.
    value: output of the value head for the prompt; None without a value head.
    """

    actions: Floats
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    decoded: bool
    value: float | None


class MolmoAct2Policy:
    """A MolmoAct2 model with its processor; implements the protocol `RobotPolicy`.

    undecoded: number of predictions in discrete mode whose tokens were invalid. As in LeRobot, the robot gets the
        middle of each dimension's range instead.

    Example:
        >>> import tempfile
        >>> from armature.components.robots.policies.molmoact2.checkpoints.tiny import make_tiny_policy
        >>> from armature.components.robots.policies.norm_stats import (
        ...     FeatureNormStats, RobotMetadata)
        >>> from armature.components.robots.policies.settings import TinyPolicySettings
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

    def __init__(
        self,
        model: MolmoAct2,
        processor: Processor,
        settings: RobotPolicySettings,
        mode: InferenceMode,
        rows: int,
        refuse_undecoded: bool = False,
    ) -> None:
        """
        Args:
            settings: The policy's settings, completed by `resolve`.
            mode: Predict actions by flow matching (continuous) or as tokens (discrete).
            rows: Number of rows of a forward pass on a GPU, for any number of observations.
            refuse_undecoded: Make `predict` raise ServerError if tokens are invalid.

        Raises:
            ConfigurationError: the policy was not trained for `mode`, or executes more actions than it predicts.
        """
        _check_settings(settings, mode)
        self.n_action_steps, self.action_dimensions = settings.n_action_steps, processor.action_dimensions
        self.undecoded = 0
        self._processor, self._settings, self._mode = processor, settings, mode
        self._refuse_undecoded = refuse_undecoded
        self._max_tokens = TOKENS_PER_ACTION * settings.chunk_size
        self._sampler = Sampler(
            model,
            InferencePlan.of(settings, model.config),
            horizon=settings.chunk_size,
            group=rows,
            width=processor.budget,
            pad_id=processor.vocabulary.pad,
        )

    @property
    def cameras(self) -> tuple[str, ...]:
        """Cameras that observations must have; empty: all cameras of each observation are used, sorted by name."""
        return self._processor.cameras

    @property
    def rows_per_pass(self) -> int:
        """Number of rows of a forward pass; 1 on a CPU."""
        return self._sampler.group

    @property
    def most_previous_actions(self) -> int:
        """Largest number of `PreviousActions` that a prediction can continue; 0 in discrete mode, which cannot."""
        return 0 if self._mode == "discrete" else self._settings.chunk_size

    @property
    def state_dimensions(self) -> int:
        """Number of dimensions of an observation's state."""
        return self._processor.state_dimensions

    def prepared(self, observation: RobotObservation) -> EncodedObservation:
        """Encode an observation ahead of its prediction."""
        return EncodedObservation(**vars(observation), example=self._processor.encode(observation))

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Floats:
        """Predict chunks, row i from observation i and seed i: (N, n_action_steps, action dimensions) float32."""
        examples = in_threads(self._example, observations)
        if self._mode == "discrete":
            chunks, _ = self._decoded(self._sampler.generate(examples, self._max_tokens))
        else:
            chunks = self._sampled(examples, seeds, [observation.previous for observation in observations])
        return self._processor.decode(chunks)[:, : self.n_action_steps]

    def answer(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> list[PlainChunk]:
        """Return the chunks that `predict` predicts, one `PlainChunk` per observation."""
        return [PlainChunk(actions) for actions in self.predict(observations, seeds)]

    def sample_flow_sde(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], noise_level: float
    ) -> list[FlowChunk]:
        """Predict chunks with one random Flow-SDE step each; the initial noise is the same as in `predict`."""
        examples = in_threads(self._example, observations)
        return self._flow_chunks(self._sampler.sample_flow_sde(examples, seeds, noise_level))

    def score_flow_losses(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], flow_samples: int
    ) -> list[FlowChunk]:
        """Predict the same chunks as `predict`, and score each by its flow-matching losses (see `Sampler`)."""
        examples = in_threads(self._example, observations)
        return self._flow_chunks(self._sampler.score_flow_losses(examples, seeds, flow_samples))

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

    def add_value_head(self, seed: int) -> None:
        """Add a value head, whose values are returned by all methods that sample or score chunks.

        Values are 0 until `load_weights`. Call this method before the first prediction.
        """
        self._sampler.model.add_value_head(seed, of_tokens=self._mode == "discrete")

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights of another checkpoint of the same policy, including the value head's if there is one here.

        Raises:
            DataError: a weight is missing, unknown, or has another shape.
        """
        fill_model(self._sampler.model, checkpoint)

    def reconfigured(self, mode: InferenceMode, rows: int, **changes: Unpack[InferenceChanges]) -> MolmoAct2Policy:
        """Return a policy that shares this one's model but predicts with other settings; see `open_policy`.

        `load_weights` of one of the two changes both.
        """
        settings = _changed(self._settings, changes)
        return MolmoAct2Policy(self._sampler.model, self._processor, settings, mode, rows, self._refuse_undecoded)

    def facts(self) -> dict[str, Any]:
        """Return the settings that describe this policy to a reader of logs, reports and the server's metadata."""
        names = ("semantics", "action_mode", "chunk_size", "setup_type", "control_mode", "norm_tag", "dtype")
        return {
            **{name: getattr(self._settings, name) for name in names},
            "quantization": self._sampler.model.quantization,
            "inference_action_mode": self._mode,
            "n_action_steps": self.n_action_steps,
            "cameras": list(self.cameras),
            "undecoded_answers": self.undecoded,
        }

    def _example(self, observation: RobotObservation) -> Example:
        if isinstance(observation, EncodedObservation):
            return observation.example
        return self._processor.encode(observation)

    def _sampled(
        self, examples: Sequence[Example], seeds: Sequence[int], previous: Sequence[PreviousActions | None]
    ) -> Floats:
        """Sample a normalized chunk for each example: (N, T, max_action_dim) float32.

        Examples with and without previous actions are sampled in separate calls. Previous actions need guidance,
        which runs other kernels.
        """
        chunks: dict[int, Floats] = {}
        for guided in (False, True):
            rows = [row for row, left in enumerate(previous) if (left is not None) == guided]
            if not rows:
                continue
            chosen, chosen_seeds = [examples[row] for row in rows], [seeds[row] for row in rows]
            if guided:
                wanted = [self._wanted(left) for left in previous if left is not None]
                sampled = self._sampler.sample_guided(
                    chosen, chosen_seeds, *map(torch.stack, zip(*wanted, strict=True))
                )
            else:
                sampled = self._sampler.sample(chosen, chosen_seeds)
            chunks |= dict(zip(rows, sampled.numpy(), strict=True))
        return np.stack([chunks[row] for row in range(len(examples))])

    def _wanted(self, previous: PreviousActions) -> tuple[Tensor, Tensor]:
        """Return the target of the guidance and its weights.

        The target (T, max_action_dim) holds the normalized previous actions, padded with 0. The weights (T,) tell how
        strongly each step is pulled to the target.
        """
        sampler, left = self._sampler, len(previous.actions)
        wanted = torch.zeros(sampler.horizon, sampler.model.config.max_action_dim)
        normalized = self._processor.action.normalize(previous.actions, "previous actions")
        wanted[:left, : self.action_dimensions] = torch.from_numpy(normalized)
        return wanted, prefix_weights(previous.delay, left, sampler.horizon)

    def _flow_chunks(self, chunks: ScoredChunks) -> list[FlowChunk]:
        """Convert each row of `chunks` to a `FlowChunk`, with actions in the dataset's units."""
        actions, executed = self._processor.decode(chunks.actions.numpy()), self.n_action_steps
        return [
            FlowChunk(
                actions=actions[row, :executed],
                before=chunks.before[row].numpy(),
                after=chunks.after[row].numpy(),
                step=None if chunks.steps is None else int(chunks.steps[row]),
                logprobs=chunks.logprobs[row, :executed, : self.action_dimensions].numpy(),
                value=None if chunks.values is None else float(chunks.values[row]),
            )
            for row in range(len(actions))
        ]

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


def open_policy(
    source: Path,
    mode: InferenceMode,
    rows: int,
    torch_compile: bool = False,
    quantization: Quantization | None = None,
    refuse_undecoded: bool = False,
    **changes: Unpack[InferenceChanges],
) -> MolmoAct2Policy:
    """Load the policy of an artifact or a checkpoint for inference, on the GPU if there is one.

    Args:
        mode, rows, refuse_undecoded: See `MolmoAct2Policy`.
        torch_compile: See `MolmoAct2.compile_layers`.
        quantization: See `MolmoAct2.quantize_text`.
        changes: Settings in place of the policy's own.

    Raises:
        ConfigurationError: the policy cannot act with these settings.
        DataError: the checkpoint is incomplete.
    """
    loaded = load_policy(source, device="cuda" if torch.cuda.is_available() else "cpu")
    loaded.model.cast_for_inference()
    if quantization is not None:
        loaded.model.quantize_text("quantization")
    if torch_compile:
        loaded.model.compile_layers(dynamic=False)
    settings = _changed(loaded.settings, changes)
    return MolmoAct2Policy(loaded.model, loaded.processor(), settings, mode, rows, refuse_undecoded)


def _changed(settings: RobotPolicySettings, changes: InferenceChanges) -> RobotPolicySettings:
    update = {name: value for name, value in changes.items() if value is not None}
    if "image_attention" in update:
        update["image_attention_at_inference"] = update.pop("image_attention")
    return settings.model_copy(update=update)


def _check_settings(settings: RobotPolicySettings, mode: InferenceMode) -> None:
    if settings.action_mode not in (mode, "both"):
        raise ConfigurationError(
            f"the policy was trained for {settings.action_mode} actions and cannot predict {mode} ones",
            code="action_mode_mismatch",
            where="inference_action_mode",
            remedy=f"set inference_action_mode = {settings.action_mode!r}",
        )
    refuse_short_chunk(settings)
