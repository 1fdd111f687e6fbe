"""A MolmoAct2 checkpoint as a robot policy: observations in, chunks of actions in the dataset's units out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from armature.components.contracts.errors import ConfigurationError, ServerError
from armature.components.contracts.robots import PreviousActions, RobotObservation
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import fill_model, load_policy
from armature.components.robots.policies.molmoact2.modeling.flow import noise_scales, prefix_weights, step_logprobs
from armature.components.robots.policies.molmoact2.modeling.model import MolmoAct2
from armature.components.robots.policies.molmoact2.processing.batch import Example, Floats
from armature.components.robots.policies.molmoact2.processing.processor import Processor, in_threads
from armature.components.robots.policies.molmoact2.sampling import InferencePlan, Sampler
from armature.components.robots.policies.settings import Quantization, RobotPolicySettings

InferenceMode = Literal["continuous", "discrete"]
TOKENS_PER_ACTION = 16
"""Generated tokens at most, for each action of a chunk; LeRobot's bound."""


@dataclass(frozen=True)
class EncodedObservation(RobotObservation):
    """With the `example` that the policy's processor makes of it."""

    example: Example = field(kw_only=True)


@dataclass(frozen=True)
class PlainChunk:
    """A chunk as an evaluation has it: (n_action_steps, action dimensions) float32 in the dataset's units."""

    actions: Floats
    value: None = None


@dataclass(frozen=True)
class FlowChunk:
    """A chunk with its log-prob, because one step of its denoising was drawn from a normal distribution, or with what
    its flow-matching losses say in place of it.

    actions: (n_action_steps, action dimensions) float32 in the dataset's units.
    before, after: (T, max_action_dim) float32, the points of the drawn step `step`; or, where that is None, the noise
        of the losses, (F, T, max_action_dim), and the normalized actions.
    logprobs: (n_action_steps, action dimensions) float64 of `after`, number by number.
    value: the value head's; None: there is no value head.
    """

    actions: Floats
    before: Floats
    after: Floats
    step: int | None
    logprobs: NDArray[np.float64]
    value: float | None


@dataclass(frozen=True)
class TokenChunk:
    """A chunk whose action tokens were drawn one by one.

    actions: (n_action_steps, action dimensions) float32 in the dataset's units; the middle of each dimension's range
        where the tokens say none.
    tokens: (K,) int32, EOS included. logprobs: (K,) float64. decoded: whether the tokens say actions.
    value: the value head's, of the prompt; None: there is no value head.
    """

    actions: Floats
    tokens: NDArray[np.int32]
    logprobs: NDArray[np.float64]
    decoded: bool
    value: float | None


class MolmoAct2Policy:
    """A `RobotPolicy`.

    undecoded: answers in discrete mode that no actions could be read from; the robot is given the middle of each
        dimension's range instead, as LeRobot does.
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
            settings: Resolved; chunk_size, n_action_steps, semantics and inference options are taken from it.
            rows: Of one forward pass, whatever number is asked for.
            refuse_undecoded: `predict` raises ServerError instead of giving the middle.

        Raises:
            ConfigurationError: the policy was not trained for `mode`, or carries out more actions than it predicts.
        """
        _refuse(settings, mode)
        self.n_action_steps, self.action_dimensions = settings.n_action_steps, processor.action_dimensions
        self.undecoded = 0
        self._processor, self._settings, self._mode = processor, settings, mode
        self._refuse_undecoded = refuse_undecoded
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
        """Keys that observations must have; empty: whatever they have, sorted."""
        return self._processor.cameras

    @property
    def rows_per_pass(self) -> int:
        """Of one forward pass; on a CPU rows run one by one."""
        return self._sampler.group

    @property
    def most_previous_actions(self) -> int:
        """Steps of the actions that an answer can continue; 0 where it cannot."""
        return 0 if self._mode == "discrete" else self._settings.chunk_size

    @property
    def state_dimensions(self) -> int:
        """Of the states that observations must have."""
        return self._processor.state_dimensions

    def prepared(self, observation: RobotObservation) -> EncodedObservation:
        return EncodedObservation(**vars(observation), example=self._processor.encode(observation))

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Floats:
        examples = in_threads(self._example, observations)
        if self._mode == "discrete":
            chunks = self._generated(examples)
        else:
            chunks = self._sampled(examples, seeds, [observation.previous for observation in observations])
        return self._processor.decode(chunks)[:, : self.n_action_steps]

    def answer(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> list[PlainChunk]:
        """As `predict`."""
        return [PlainChunk(actions) for actions in self.predict(observations, seeds)]

    def sample_flow_sde(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], noise_level: float
    ) -> list[FlowChunk]:
        """Predict from the same noise as `predict`, with one random Flow-SDE step per row (see `Sampler`)."""
        sampler = self._sampler
        examples = in_threads(self._example, observations)
        chunks = sampler.sample_flow_sde(examples, seeds, noise_level)
        sigmas = noise_scales(sampler.plan.steps, noise_level)
        logprobs = step_logprobs(chunks.before, chunks.after, chunks.velocity, chunks.step, sigmas)
        steps = chunks.step.tolist()
        return self._explored(chunks.actions, chunks.before, chunks.after, steps, logprobs, chunks.values)

    def score_flow_losses(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], flow_samples: int
    ) -> list[FlowChunk]:
        """Predict the same chunks as `predict`, and score each by its flow-matching losses (see `Sampler`)."""
        examples = in_threads(self._example, observations)
        chunks = self._sampler.score_flow_losses(examples, seeds, flow_samples)
        steps = [None] * len(examples)
        return self._explored(chunks.actions, chunks.noise, chunks.actions, steps, chunks.logprobs, chunks.values)

    def sample_action_tokens(
        self, observations: Sequence[RobotObservation], seeds: Sequence[int], temperature: float
    ) -> list[TokenChunk]:
        """As `predict` of action tokens, which are drawn: row i by seed i alone."""
        examples = in_threads(self._example, observations)
        drawn = self._sampler.draw(examples, seeds, self._most_tokens, temperature)
        chunks, decoded = self._decoded([each.tokens for each in drawn])
        actions = self._processor.decode(chunks)[:, : self.n_action_steps]
        return [
            TokenChunk(
                actions=actions[row],
                tokens=np.array(each.tokens, np.int32),
                logprobs=np.array(each.logprobs),
                decoded=decoded[row],
                value=each.value,
            )
            for row, each in enumerate(drawn)
        ]

    def add_value_head(self, seed: int) -> None:
        """Add a value head, whose values are returned by all methods that sample or score chunks.

        Values are 0 until `load_weights`. Call this method before the first prediction.
        """
        self._sampler.model.add_value_head(seed, of_tokens=self._mode == "discrete")

    def load_weights(self, checkpoint: Path) -> None:
        """Those of another checkpoint of the same policy, and of its value head if there is one here.

        Raises:
            DataError: a weight is missing, unknown or of another shape.
        """
        fill_model(self._sampler.model, checkpoint)

    def asked(
        self,
        mode: InferenceMode,
        rows: int,
        n_action_steps: int | None = None,
        num_inference_steps: int | None = None,
        image_attention: Literal["bidirectional", "as_trained"] | None = None,
    ) -> MolmoAct2Policy:
        """The same weights, asked in another way; `load_weights` of one gives them to both.

        Args, Raises:
            as `open_policy`.
        """
        settings = _changed(self._settings, n_action_steps, num_inference_steps, image_attention)
        return MolmoAct2Policy(self._sampler.model, self._processor, settings, mode, rows, self._refuse_undecoded)

    def facts(self) -> dict[str, Any]:
        told = ("semantics", "action_mode", "chunk_size", "setup_type", "control_mode", "norm_tag", "dtype")
        return {
            **{name: getattr(self._settings, name) for name in told},
            "quantization": self._sampler.model.quantization,
            "inference_action_mode": self._mode,
            "n_action_steps": self.n_action_steps,
            "cameras": list(self.cameras),
            "undecoded_answers": self.undecoded,
        }

    def _example(self, observation: RobotObservation) -> Example:
        return (
            observation.example if isinstance(observation, EncodedObservation) else self._processor.encode(observation)
        )

    def _sampled(
        self, examples: Sequence[Example], seeds: Sequence[int], previous: Sequence[PreviousActions | None]
    ) -> Floats:
        """Those that continue previous actions, and those that do not, apart: their answers have other kernels."""
        found: dict[int, Floats] = {}
        for extended in (False, True):
            rows = [row for row, left in enumerate(previous) if (left is not None) == extended]
            if not rows:
                continue
            chosen, own = [examples[row] for row in rows], [seeds[row] for row in rows]
            if extended:
                wanted = [self._wanted(left) for left in previous if left is not None]
                chunks = self._sampler.extend(chosen, own, *map(torch.stack, zip(*wanted, strict=True)))
            else:
                chunks = self._sampler.sample(chosen, own)
            found |= dict(zip(rows, chunks.numpy(), strict=True))
        return np.stack([found[row] for row in range(len(examples))])

    def _wanted(self, previous: PreviousActions) -> tuple[Tensor, Tensor]:
        """Normalized actions (T, max_action_dim) and their weights (T,)."""
        sampler, left = self._sampler, len(previous.actions)
        wanted = torch.zeros(sampler.horizon, sampler.model.config.max_action_dim)
        normalized = self._processor.action.normalize(previous.actions, "previous actions")
        wanted[:left, : self.action_dimensions] = torch.from_numpy(normalized)
        return wanted, prefix_weights(previous.delay, left, sampler.horizon)

    def _explored(
        self,
        normalized: Tensor,
        before: Tensor,
        after: Tensor,
        steps: Sequence[int | None],
        logprobs: Tensor,
        values: Tensor | None,
    ) -> list[FlowChunk]:
        """Of each row, from the normalized actions (N, T, max_action_dim) and what an answer tells of them."""
        actions, carried, own = self._processor.decode(normalized.numpy()), self.n_action_steps, self.action_dimensions
        return [
            FlowChunk(
                actions=actions[row, :carried],
                before=before[row].numpy(),
                after=after[row].numpy(),
                step=step,
                logprobs=logprobs[row, :carried, :own].numpy(),
                value=None if values is None else float(values[row]),
            )
            for row, step in enumerate(steps)
        ]

    @property
    def _most_tokens(self) -> int:
        return TOKENS_PER_ACTION * self._settings.chunk_size

    def _generated(self, examples: Sequence[Example]) -> Floats:
        return self._decoded(self._sampler.generate(examples, self._most_tokens))[0]

    def _decoded(self, answers: Sequence[Sequence[int]]) -> tuple[Floats, list[bool]]:
        """Normalized actions of generated tokens, and whether they say any.

        Raises:
            ServerError: they say none, and this is refused.
        """
        decoded = [self._processor.decode_tokens(ids) for ids in answers]
        undecoded = [each for each in decoded if each.actions is None]
        self.undecoded += len(undecoded)
        if undecoded and self._refuse_undecoded:
            raise ServerError(
                f"no actions can be read from the policy's answer: {undecoded[0].error}",
                code="undecodable_actions",
                remedy="train it longer, or answer by flow matching if it was trained for both",
            )
        nothing = np.zeros((self._settings.chunk_size, self.action_dimensions), np.float32)
        chunks = np.stack([nothing if each.actions is None else each.actions for each in decoded])
        return chunks, [each.actions is not None for each in decoded]


def open_policy(
    source: Path,
    mode: InferenceMode,
    rows: int,
    n_action_steps: int | None = None,
    num_inference_steps: int | None = None,
    image_attention: Literal["bidirectional", "as_trained"] | None = None,
    torch_compile: bool = False,
    quantization: Quantization | None = None,
    refuse_undecoded: bool = False,
) -> MolmoAct2Policy:
    """The policy of an artifact or a checkpoint, on the GPU where there is one.

    Args:
        n_action_steps, num_inference_steps, image_attention: instead of the policy's own, where given.
        torch_compile: see `MolmoAct2.compile_layers`. quantization: see `MolmoAct2.quantize_text`.
        refuse_undecoded: see `MolmoAct2Policy`.

    Raises:
        ConfigurationError: the policy cannot act in this way.
        DataError: the checkpoint is not whole.
    """
    loaded = load_policy(source, device="cuda" if torch.cuda.is_available() else "cpu")
    loaded.model.cast_for_inference()
    if quantization is not None:
        loaded.model.quantize_text("quantization")
    if torch_compile:
        loaded.model.compile_layers(dynamic=False)
    settings = _changed(loaded.settings, n_action_steps, num_inference_steps, image_attention)
    return MolmoAct2Policy(loaded.model, loaded.processor(), settings, mode, rows, refuse_undecoded)


def _changed(
    settings: RobotPolicySettings,
    n_action_steps: int | None,
    num_inference_steps: int | None,
    image_attention: Literal["bidirectional", "as_trained"] | None,
) -> RobotPolicySettings:
    changes = {
        "n_action_steps": n_action_steps,
        "num_inference_steps": num_inference_steps,
        "image_attention_at_inference": image_attention,
    }
    return settings.model_copy(update={name: value for name, value in changes.items() if value is not None})


def _refuse(settings: RobotPolicySettings, mode: InferenceMode) -> None:
    if settings.action_mode not in (mode, "both"):
        raise ConfigurationError(
            f"the policy was trained for {settings.action_mode} actions and cannot answer with {mode} ones",
            code="action_mode_mismatch",
            where="inference_action_mode",
            remedy=f"set inference_action_mode = {settings.action_mode!r}",
        )
    if settings.n_action_steps > settings.chunk_size:
        raise ConfigurationError(
            f"{settings.n_action_steps} actions are to be carried out of chunks of {settings.chunk_size}",
            code="chunk_too_short",
            where="n_action_steps",
            remedy=f"set it to {settings.chunk_size} at most",
        )
