"""Whether trainer and server compute the same log-probs, and the likely reason if they do not."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from armature.components.contracts.batches import Sample
from armature.components.contracts.errors import MismatchError
from armature.components.contracts.installation import SERVED
from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.client import Completion, Message, Sampling
from armature.components.rollouts.play import Generator


@dataclass(frozen=True)
class LogprobAgreement:
    """Over all sampled tokens, with d = trainer's log-prob - server's and r = exp(d).

    `mismatch_kl` is the mean of (r - 1) - d, the k3 estimate of KL(server || trainer) in nats;
    `fraction_lower` the share of tokens to which the trainer gives a clearly smaller probability.
    `image_kl` and `text_kl` are the mismatch KL over the samples with and without images, NaN if there are none.
    """

    tokens: int
    mismatch_kl: float
    mean_ratio: float
    max_difference: float
    fraction_lower: float
    image_kl: float
    text_kl: float

    def lines(self) -> list[str]:
        return [
            f"tokens compared        {self.tokens}",
            f"mismatch KL            {self.mismatch_kl:.3g}",
            f"mean ratio             {self.mean_ratio:.6f}",
            f"largest |difference|   {self.max_difference:.3g}",
        ]


def compare(samples: Sequence[Sample], scores: Sequence[LogProbs]) -> LogprobAgreement:
    """`scores[i]` (L,) are the trainer's log-probs of `samples[i]`, valid where its loss_mask is True."""
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


def refuse_mismatch(agreement: LogprobAgreement, drops: Counter[str], max_kl: float) -> None:
    """
    Raises:
        MismatchError: there is nothing to compare, or the two sides differ by more than `max_kl`.
    """
    if agreement.tokens == 0:
        raise MismatchError(
            "no rollout could be turned into a sample: "
            + (", ".join(f"{reason} {count}" for reason, count in drops.most_common()) or "nothing was generated"),
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


FIRST_UPDATE = "mismatch_kl/first_update"
OLDEST = "policy_version/min"
"""How far trainer and servers are apart, before an update of the step has moved the policy."""


def step_mismatch(metrics: Mapping[str, float], step: int, max_kl: float) -> MismatchError | None:
    """What is wrong with a step in which the two sides differ by more than `max_kl`.

    One without tokens is fine, and one whose rollouts are of earlier weights (max_staleness) is not judged: there the
    policy has moved since, and every sync was proved by itself.
    """
    kl = metrics.get(FIRST_UPDATE, 0.0)
    if kl <= max_kl or metrics.get(OLDEST, step - 1) < step - 1:
        return None
    return MismatchError(
        f"trainer and server disagree in step {step}: mismatch KL {kl:.3g} > {max_kl:g}, mean ratio "
        f"{metrics.get('importance_ratio', float('nan')):.4f}",
        code="logprobs_mismatch",
        where="preflight.max_step_mismatch_kl",
        remedy="its rollouts are not of the weights that they name: read the servers' logs, then delete the rollouts "
        "and the batch of this step and start again; or set preflight.step_mismatch = 'warn'",
    )


def likely_reason(agreement: LogprobAgreement) -> str:
    """A truncated sampler (top_p, top_k, min_p) renormalizes, so the trainer's probability is never the larger."""
    if agreement.fraction_lower > 0.2 and agreement.mean_ratio < 0.99 and agreement.max_difference < 8.0:
        share_not_lower = 1.0 - agreement.fraction_lower
        return (
            "the server seems to sample from a truncated or sharpened distribution "
            f"({agreement.fraction_lower:.0%} of tokens are likelier there, {share_not_lower:.0%} equal): start it "
            "with --generation-config vllm --logprobs-mode processed_logprobs, and set top_p = 1, no top_k, no "
            "min_p, no penalties and the trainer's temperature"
        )
    images = (
        "the server seems to attend to images otherwise than the trainer. If image tokens attend to each other "
        "in both directions (molmo2, gemma3), a server needs --attention-backend TRITON_ATTN for it and vLLM on CPU "
        'cannot do it: set model.image_attention = "causal" there. A joined server for molmo2 needs our plug-in as '
        f"well: pip install --no-deps {SERVED}"
    )
    weights = (
        "the server seems to serve other weights than the trainer's: start it with the checkpoint of [model], "
        "the same dtype, and processed log-probs (--logprobs-mode processed_logprobs)"
    )
    if agreement.image_kl > 100 * agreement.text_kl:
        return images
    return weights if np.isnan(agreement.image_kl) or agreement.text_kl > 0 else f"{weights}; or {images}"


def _remedy_for_drops(drops: Counter[str]) -> str:
    if drops and "placeholder" in drops.most_common(1)[0][0]:
        return (
            "the server expands images to another number of tokens than the trainer's processor: both must have "
            "the same preprocessor_config.json (image size, patch size, merge size)"
        )
    return "look at the reasons above; docs/operations/faults.md explains each"


# Whether servers turn tokens into text with the run's tokenizer.
#
# Everything that is trained on is token ids, so log-probs agree whatever tokenizer a server has; rewards are of its
# text.


class RecordingGenerator:
    """Answers as `generator` does and keeps every completion in `completions`."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.completions: list[Completion] = []

    async def complete(self, messages: Sequence[Message], sampling: Sampling, seed: int) -> Completion:
        completion = await self._generator.complete(messages, sampling, seed)
        self.completions.append(completion)
        return completion


def refuse_other_texts(completions: Sequence[Completion], tokenizer: Tokenizer) -> None:
    """
    Raises:
        MismatchError: a server's text is not what `tokenizer` makes of the tokens; the server's URL and both texts.
    """
    by_server: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for completion in completions:
        if (own := _text(completion, tokenizer)) is not None:
            by_server[completion.server].append((own, completion.text.strip()))
    for server, texts in by_server.items():
        # A server with a reasoning parser leaves thoughts out, at times all there is.
        answered = [pair for pair in texts if pair[1]] or texts
        if different := [(own, theirs) for own, theirs in answered if not _is_part(theirs, own)]:
            own, theirs = different[0]
            raise MismatchError(
                f"the server makes other text of the same tokens than the run's tokenizer, {len(different)} times in "
                f"{len(answered)}; it says {theirs[:200]!r}, the tokenizer {own[:200]!r}",
                code="server_tokenizer_mismatch",
                where=server,
                remedy="start the server from this run's model: a run gives its weights to servers that it joins, not "
                "its tokenizer, and rewards are of the server's text",
            )


def _is_part(theirs: str, own: str) -> bool:
    return theirs in own if theirs else not own.strip()


def _text(completion: Completion, tokenizer: Tokenizer) -> str | None:
    """What a vLLM server with `tokenizer` says: without the token that it stopped at, without a last character that
    is not whole, special tokens included. None if bytes that are not text make that undefined.
    """
    said = completion.token_ids.tolist()
    if completion.finish_reason == "stop":
        said.pop()
    stream = DecodeStream(ids=completion.prompt_token_ids.tolist(), skip_special_tokens=False)
    try:
        parts = [stream.step(tokenizer, token) for token in said]
    except Exception as error:  # the Rust library raises Exception itself, with no class of its own
        if "Invalid prefix" not in str(error):
            raise
        return None
    return "".join(part for part in parts if part is not None)
