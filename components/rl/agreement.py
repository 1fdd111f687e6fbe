"""Checks that trainer and servers agree: on log-probs, with the likely reason if not, and on the text of tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import MismatchError
from armature.components.contracts.installation import SERVED
from armature.components.contracts.rollouts import Failure, LogProbs
from armature.components.inference.client import Completion, Message, Sampling
from armature.components.inference.tool_calls import ToolFormat
from armature.components.rollouts.play import Generator


@dataclass(frozen=True)
class LogprobAgreement:
    """A comparison of the trainer's and the server's log-probs of the same sampled tokens.

    For each token, d = trainer's log-prob - server's log-prob and r = exp(d).
    """

    tokens: int
    """Number of tokens that were compared."""
    mismatch_kl: float
    """Mean of (r - 1) - d, the k3 estimate of KL(server || trainer), in nats."""
    mean_ratio: float
    """Mean of r."""
    max_difference: float
    """Largest |d|."""
    fraction_lower: float
    """Share of tokens whose probability is clearly smaller in the trainer."""
    image_kl: float
    """`mismatch_kl` over the samples with images; NaN if there are none."""
    text_kl: float
    """`mismatch_kl` over the samples without images; NaN if there are none."""

    def lines(self) -> list[str]:
        """Return the lines of a report."""
        return [
            f"tokens compared        {self.tokens}",
            f"mismatch KL            {self.mismatch_kl:.3g}",
            f"mean ratio             {self.mean_ratio:.6f}",
            f"largest |difference|   {self.max_difference:.3g}",
        ]


def compare(samples: Sequence[Sample], scores: Sequence[LogProbs]) -> LogprobAgreement:
    """Compare the trainer's log-probs of sampled tokens with the server's.

    Args:
        samples: samples with the server's log-probs.
        scores: for each sample the trainer's log-probs (L,), valid where its loss_mask is True.
    """
    pairs = zip(samples, scores, strict=True)
    parts = [(score - sample.behavior_logprobs)[sample.loss_mask].astype(np.float64) for sample, score in pairs]
    difference = np.concatenate(parts) if parts else np.zeros(0)
    if difference.size == 0:
        return LogprobAgreement(0, *[float("nan")] * 6)
    ratio = np.exp(np.minimum(difference, 50.0))
    shown = [bool(sample.images) for sample in samples]
    return LogprobAgreement(
        tokens=int(difference.size),
        mismatch_kl=_mismatch_kl(difference),
        mean_ratio=float(np.mean(ratio)),
        max_difference=float(np.max(np.abs(difference))),
        fraction_lower=float(np.mean(difference < -1e-2)),
        image_kl=_mismatch_kl(*(part for part, image in zip(parts, shown, strict=True) if image)),
        text_kl=_mismatch_kl(*(part for part, image in zip(parts, shown, strict=True) if not image)),
    )


def _mismatch_kl(*parts: npt.NDArray[np.float64]) -> float:
    difference = np.concatenate([np.zeros(0), *parts])
    return float(np.mean(np.expm1(np.minimum(difference, 50.0)) - difference)) if difference.size else float("nan")


def refuse_mismatch(
    agreement: LogprobAgreement, drops: Counter[str], max_kl: float, failures: Sequence[Failure] = ()
) -> None:
    """Refuse to train if trainer and server do not agree.

    Args:
        drops: number of dropped rollouts by reason, for the error.
        failures: failed rollouts, for the error, which shows the detail of the first one.
        max_kl: largest accepted `mismatch_kl`.

    Raises:
        MismatchError: there are no tokens to compare, or the mismatch KL is larger than `max_kl`.
    """
    if agreement.tokens == 0:
        raise MismatchError(
            "none of the rollouts became a training sample: "
            + (", ".join(f"{reason} {count}" for reason, count in drops.most_common()) or "nothing was generated")
            + (f"; {failures[0].trajectory_id} failed: {failures[0].detail}" if failures else ""),
            code="no_samples",
            where="pre-flight",
            remedy=_remedy_for_drops(drops),
        )
    if not agreement.mismatch_kl <= max_kl:
        raise MismatchError(
            f"trainer and server disagree: mismatch KL {agreement.mismatch_kl:.3g} > {max_kl:g}, "
            f"mean ratio {agreement.mean_ratio:.4f}",
            code="logprobs_mismatch",
            where="pre-flight",
            remedy=likely_reason(agreement),
        )


ROUNDING_KL = 1e-9
"""Mismatch KL in nats that rounding in fp32 stays below."""


def refuse_replay(replayed: LogprobAgreement, without: LogprobAgreement) -> None:
    """Refuse to replay experts that do not make trainer and server agree better.

    Equal numbers are accepted: then no choice of a router differed, or all of them were within rounding.

    Raises:
        MismatchError: the mismatch KL with the server's experts is larger than with the trainer's own, or it is as
            large although log-probs differ.
    """
    same = (replayed.mismatch_kl, replayed.max_difference) == (without.mismatch_kl, without.max_difference)
    if same or replayed.mismatch_kl < max(without.mismatch_kl, ROUNDING_KL):
        return
    raise MismatchError(
        f"replaying the server's experts does not help: mismatch KL {replayed.mismatch_kl:.3g} with them, "
        f"{without.mismatch_kl:.3g} without",
        code="replay_useless",
        where="pre-flight, inference.replay_experts",
        remedy="the server's experts are not those of its tokens: update vLLM, or set inference.replay_experts = false",
    )


FIRST_UPDATE = "mismatch_kl/first_update"
"""Name of the metric with the mismatch KL of a step's first update. Until then the step has not changed the policy."""
OLDEST = "policy_version/min"
"""Name of the metric with the oldest version of the weights that sampled a step's tokens."""


def step_mismatch(metrics: Mapping[str, float], step: int, max_kl: float) -> MismatchError | None:
    """Return an error if trainer and server differ by more than `max_kl` in a step, else None.

    A step without tokens is fine. A step with rollouts of earlier weights (max_staleness) is not checked: the policy
    has changed since then, and every weight sync is checked by itself.
    """
    kl = metrics.get(FIRST_UPDATE, 0.0)
    if kl <= max_kl or metrics.get(OLDEST, step - 1) < step - 1:
        return None
    return MismatchError(
        f"trainer and server disagree in step {step}: mismatch KL {kl:.3g} > {max_kl:g}, mean ratio "
        f"{metrics.get('importance_ratio', float('nan')):.4f}",
        code="logprobs_mismatch",
        where="preflight.max_step_mismatch_kl",
        remedy="the rollouts were not sampled by the weights version recorded in them: read the servers' logs, delete "
        "the rollouts and the batch of this step and start again; or set preflight.step_mismatch = 'warn'",
    )


def likely_reason(agreement: LogprobAgreement) -> str:
    """Return the likely reason for a mismatch, and what to do about it.

    A sampler that truncates (top_p, top_k, min_p) renormalizes, so the trainer's probability is never the larger one.
    """
    if agreement.fraction_lower > 0.2 and agreement.mean_ratio < 0.99 and agreement.max_difference < 8.0:
        share_not_lower = 1.0 - agreement.fraction_lower
        return (
            "the server seems to sample from a truncated or sharpened distribution "
            f"({agreement.fraction_lower:.0%} of tokens are likelier there, {share_not_lower:.0%} equal): start it "
            "with --generation-config vllm --logprobs-mode processed_logprobs, and set top_p = 1 and the trainer's "
            "temperature, without top_k, min_p and penalties"
        )
    images = (
        "the server seems to attend to images in another way than the trainer. If image tokens attend to each other "
        "in both directions (molmo2, gemma3), start the server with --attention-backend TRITON_ATTN; vLLM on CPU does "
        'not support this, so set model.image_attention = "causal" there. A joined server for molmo2 also needs our '
        f"plug-in: pip install --no-deps {SERVED}"
    )
    weights = (
        "the server seems to have other weights than the trainer: start it with the checkpoint of [model], the same "
        "dtype, and processed log-probs (--logprobs-mode processed_logprobs)"
    )
    if agreement.image_kl > 100 * agreement.text_kl:
        return images
    return weights if np.isnan(agreement.image_kl) or agreement.text_kl > 0 else f"{weights}; or {images}"


def _remedy_for_drops(drops: Counter[str]) -> str:
    if drops and "placeholder" in drops.most_common(1)[0][0]:
        return (
            "the server expands images to another number of tokens than the trainer's processor: give both the same "
            "preprocessor_config.json (image size, patch size, merge size)"
        )
    return "see the reasons above; docs/operations/faults.md explains each of them"


# --- The tokenizer of servers ---
#
# Training uses token ids only, so log-probs agree even if a server has another tokenizer. But rewards are computed from
# the server's text.


class RecordingGenerator:
    """A generator that passes requests on to `generator` and stores every completion in `completions`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.completions: list[Completion] = []

    @property
    def tool_format(self) -> ToolFormat:
        return self._generator.tool_format

    async def complete(
        self, messages: Sequence[Message], sampling: Sampling, seed: int, tools: Sequence[Mapping[str, Any]] = ()
    ) -> Completion:
        offered = {"tools": tools} if tools else {}  # scripted policies need not know of tools
        completion = await self._generator.complete(messages, sampling, seed, **offered)
        self.completions.append(completion)
        return completion


def refuse_other_texts(completions: Sequence[Completion], tokenizer: Tokenizer) -> None:
    """Refuse servers whose text for the sampled tokens differs from the run's tokenizer.

    Raises:
        MismatchError: the texts differ; the error has the server's URL and both texts.
    """
    by_server: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for completion in completions:
        if (expected := _text(completion, tokenizer)) is not None:
            by_server[completion.server].append((expected, completion.text.strip()))
    for server, texts in by_server.items():
        # A server with a reasoning parser omits thoughts, which may be the whole text.
        answered = [pair for pair in texts if pair[1]] or texts
        if different := [pair for pair in answered if not _is_part(pair[1], pair[0])]:
            expected, text = different[0]
            raise MismatchError(
                f"the server and the run's tokenizer decode the same tokens to different texts, {len(different)} times "
                f"in {len(answered)}; server: {text[:200]!r}, tokenizer: {expected[:200]!r}",
                code="server_tokenizer_mismatch",
                where=server,
                remedy="start the server from this run's model: a run gives servers that it joins its weights, not "
                "its tokenizer, and rewards are computed from the server's text",
            )


def _is_part(text: str, expected: str) -> bool:
    return text in expected if text else not expected.strip()


def _text(completion: Completion, tokenizer: Tokenizer) -> str | None:
    """Return the text that a vLLM server with `tokenizer` would return for the completion's tokens.

    It omits the token at which the server stopped and an incomplete last character, and includes special tokens. None
    if the tokens are bytes that are not valid text, for which the result is undefined.
    """
    tokens = completion.token_ids.tolist()
    if completion.finish_reason == "stop":
        tokens.pop()
    stream = DecodeStream(ids=completion.prompt_token_ids.tolist(), skip_special_tokens=False)
    try:
        parts = [stream.step(tokenizer, token) for token in tokens]
    except Exception as error:  # the Rust library raises plain Exception
        if "Invalid prefix" not in str(error):
            raise
        return None
    return "".join(part for part in parts if part is not None)
