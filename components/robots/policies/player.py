"""The base of policies of this process: predict, sample and score chunks of actions, in the dataset's units."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, TypedDict, Unpack

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.robots import PreviousActions, RobotObservation
from armature.components.robots.policies.family import family, family_at, load_model
from armature.components.robots.policies.flow import prefix_weights
from armature.components.robots.policies.inputs import in_threads
from armature.components.robots.policies.norm_stats import Floats
from armature.components.robots.policies.sampling import FlowSampler, ScoredChunks
from armature.components.robots.policies.settings import InferenceMode, Quantization, RobotPolicySettings
from armature.components.robots.policies.source import refuse_short_chunk


class InferenceChanges(TypedDict, total=False):
    """Settings that replace the policy's own settings at inference; None keeps the policy's own value."""

    n_action_steps: int | None
    num_inference_steps: int | None
    image_attention: Literal["bidirectional", "as_trained"] | None


@dataclass(frozen=True)
class EncodedObservation(RobotObservation):
    """An observation with the `example` that the policy's processor has encoded."""

    example: Any = field(kw_only=True)


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


class FlowPolicy(ABC):
    """A model with its processor that predicts by flow matching; implements the protocol `RobotPolicy`.

    undecoded: number of predictions whose action tokens were invalid. A family without action tokens has none.
    """

    FACTS: tuple[str, ...] = ("family", "chunk_size", "dtype")
    """Settings that describe a policy of the family."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        settings: RobotPolicySettings,
        mode: InferenceMode,
        rows: int,
        refuse_undecoded: bool = False,
    ) -> None:
        """
        Args:
            settings: The policy's settings, completed by the checkpoint's.
            mode: Predict actions by flow matching (continuous) or as tokens (discrete).
            rows: Number of rows of a forward pass on a GPU, for any number of observations.
            refuse_undecoded: Make `predict` raise ServerError if tokens are invalid.

        Raises:
            ConfigurationError: the policy was not trained for `mode`, or executes more actions than it predicts.
        """
        if settings.action_mode not in (mode, "both"):
            raise ConfigurationError(
                f"the policy was trained for {settings.action_mode} actions and cannot predict {mode} ones",
                code="action_mode_mismatch",
                where="inference_action_mode",
                remedy=f"set inference_action_mode = {settings.action_mode!r}",
            )
        refuse_short_chunk(settings)
        self.n_action_steps, self.action_dimensions = settings.n_action_steps, processor.action_dimensions
        self.undecoded = 0
        self._processor, self._settings, self._mode = processor, settings, mode
        self._refuse_undecoded = refuse_undecoded
        self._sampler = self._make_sampler(model, rows)

    @abstractmethod
    def _make_sampler(self, model: Any, rows: int) -> FlowSampler[Any, Any]:
        """Return the sampler of the family's model."""

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights of another checkpoint of the same policy, including the value head's if there is one here.

        Raises:
            DataError: a weight is missing, unknown, or has another shape.
        """
        family(self._settings.family).fill_model(self._sampler.model, checkpoint)

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
        """Largest number of `PreviousActions` that a prediction can continue; 0 if it cannot."""
        return 0

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
        """Predict the same chunks as `predict`, and score each by its flow-matching losses (see `FlowSampler`)."""
        examples = in_threads(self._example, observations)
        return self._flow_chunks(self._sampler.score_flow_losses(examples, seeds, flow_samples))

    def sample_action_tokens(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], temperature: float
    ) -> list[TokenChunk]:
        """Predict chunks by sampling action tokens, row i from seed i alone."""
        raise NotImplementedError("this family has no action tokens, which its settings refuse")

    def add_value_head(self, seed: int) -> None:
        """Add a value head, whose values are returned by all methods that sample or score chunks.

        Values are 0 until `load_weights`. Call this method before the first prediction.
        """
        self._sampler.model.add_value_head(seed, of_tokens=self._mode == "discrete")

    def reconfigured(self, mode: InferenceMode, rows: int, **changes: Unpack[InferenceChanges]) -> Self:
        """Return a policy that shares this one's model but predicts with other settings.

        `load_weights` of one of the two changes both.
        """
        settings = changed(self._settings, changes)
        return type(self)(self._sampler.model, self._processor, settings, mode, rows, self._refuse_undecoded)

    def facts(self) -> dict[str, Any]:
        """Return the settings that describe this policy to a reader of logs, reports and the server's metadata."""
        return {
            **{name: getattr(self._settings, name) for name in self.FACTS},
            "inference_action_mode": self._mode,
            "n_action_steps": self.n_action_steps,
            "cameras": list(self.cameras),
        }

    def _example(self, observation: RobotObservation) -> Any:
        if isinstance(observation, EncodedObservation):
            return observation.example
        return self._processor.encode(observation)

    def _sampled(
        self, examples: Sequence[Any], seeds: Sequence[int], previous: Sequence[PreviousActions | None]
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


def open_flow_policy(
    source: Path,
    mode: InferenceMode,
    rows: int,
    torch_compile: bool = False,
    quantization: Quantization | None = None,
    refuse_undecoded: bool = False,
    **changes: Unpack[InferenceChanges],
) -> FlowPolicy:
    """Load the policy of an artifact or a checkpoint for inference, on the GPU if there is one.

    Args:
        mode, rows, refuse_undecoded: See `FlowPolicy`.
        torch_compile: Compile the layers; see `PolicyModel.compile_layers`.
        quantization: Compute the text layers in 8 bits; see `PolicyModel.quantize_text`.
        changes: Settings in place of the policy's own.

    Raises:
        ConfigurationError: the policy cannot act with these settings.
        DataError: the checkpoint is incomplete.
    """
    kind = family_at(source)
    parts = kind.load_parts(source)
    asked: dict[str, Any] = {"torch_compile": torch_compile, "quantization": quantization}
    asked["image_attention_at_inference"] = changes.get("image_attention")
    if parts.settings.family != "molmoact2" and (unsupported := [name for name, value in asked.items() if value]):
        raise ConfigurationError(
            f"a policy of the family {parts.settings.family} does not support {', '.join(unsupported)}",
            code="policy_setting_unsupported",
            where=", ".join(unsupported),
            remedy="leave it out",
        )
    model = load_model(source, parts, "cuda" if torch.cuda.is_available() else "cpu")
    model.cast_for_inference()
    if quantization is not None:
        model.quantize_text("quantization")
    if torch_compile:
        model.compile_layers(dynamic=False)
    settings = changed(parts.settings, changes)
    return kind.player(model, parts.processor(), settings, mode, rows, refuse_undecoded)


def changed(settings: RobotPolicySettings, changes: InferenceChanges) -> RobotPolicySettings:
    """Return the settings with changes for inference."""
    update = {name: value for name, value in changes.items() if value is not None}
    if "image_attention" in update:
        update["image_attention_at_inference"] = update.pop("image_attention")
    return settings.model_copy(update=update)
