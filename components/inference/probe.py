"""The probe: a fixed prompt whose log-probs show which weights a model has. `SyncCheck` compares a server's log-probs
of the probe with the trainer's."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
from PIL import Image

from armature.components.contracts.errors import WeightSyncError
from armature.components.contracts.installation import SERVED
from armature.components.contracts.machine import Machine
from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.replica import Replica
from armature.components.inference.replies import Endpoint
from armature.components.inference.settings import ServerSettings
from armature.components.inference.weights.pool import post

TOKENS = 128
"""Largest number of tokens in the probe's text."""
LIKELIEST = 20
"""Number of log-probs that vLLM returns for one position (its default max_logprobs)."""
WORDS = "Describe it."
"""Text of the user's message with the probe's image."""


@dataclass(frozen=True)
class Probe:
    """A fixed text and a fixed message with an image.

    The answer to a probe is one array: the (L-1,) log-probs of the text after its first token, then the `LIKELIEST`
    greatest log-probs, in descending order, of the token after the message. All are computed at temperature 1, and no
    token is masked. Every row of the output head contributes to every log-prob through the softmax. The tokens are
    random because random tokens stay unlikely, and so informative, after training has made the model certain.

    Attributes:
        tokens: (L,) random token ids, each at most once.
        image: a PNG in base64, shown in a user's message that ends in `WORDS`; "" if the servers take no images.

    Example:
        >>> probe = make_probe(vocabulary=1000, forbidden=[7], max_tokens=64, images=False)
        >>> len(probe.tokens), 7 in probe.tokens, probe.image
        (64, False, '')
    """

    tokens: tuple[int, ...]
    image: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))  # JSON brings a list

    def pil_image(self) -> Image.Image:
        """Return the probe's image as an RGB image of Pillow."""
        return Image.open(io.BytesIO(base64.b64decode(self.image))).convert("RGB")


@dataclass(frozen=True, eq=False)
class ProbeAnswer:
    """A model's answer to a probe. `dtype` is the least precise dtype of its weights and of its matrix products."""

    logprobs: LogProbs
    dtype: str


def make_probe(vocabulary: int, forbidden: Sequence[int], max_tokens: int, images: bool) -> Probe:
    """Return a probe with random token ids below `vocabulary`, at most `max_tokens`, and with an image if `images`.

    Equal arguments give equal probes. None of the `forbidden` ids occurs in it.
    """
    random = np.random.default_rng(0)
    drawn = random.choice(vocabulary, min(vocabulary, TOKENS + len(forbidden)), replace=False)
    tokens = [token for token in drawn.tolist() if token not in forbidden][: min(TOKENS, max_tokens)]
    return Probe(tuple(tokens), random_image(random, 64, 48) if images else "")


def random_image(random: np.random.Generator, width: int, height: int) -> str:
    """Return a PNG of random pixels, in base64."""
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def ask_probe(http: httpx.AsyncClient, endpoint: Endpoint, probe: Probe, model: str = MODEL_NAME) -> LogProbs:
    """Send the probe to a server and return its log-probs, in the order that `Probe` describes.

    Args:
        model: name by which the server knows the weights to use.

    Raises:
        WeightSyncError: the server rejects the request, or its response has no log-probs.
        httpx.TransportError: the server is gone.
    """
    common = {"model": model, "max_tokens": 1, "temperature": 0.0, "seed": 0}
    text = common | {"prompt": probe.tokens, "prompt_logprobs": 0}
    try:
        entries = (await post(http, endpoint, "/v1/completions", text)).document["choices"][0]["prompt_logprobs"][1:]
        pairs = zip(probe.tokens[1:], entries, strict=True)
        values = [entry[str(token)]["logprob"] for token, entry in pairs]
        if probe.image:
            chat = common | {"messages": user_message(probe.image), "logprobs": True, "top_logprobs": LIKELIEST}
            (choice,) = (await post(http, endpoint, "/v1/chat/completions", chat)).document["choices"]
            values += sorted((one["logprob"] for one in choice["logprobs"]["content"][0]["top_logprobs"]), reverse=True)
        if any(type(value) not in (int, float) for value in values):
            raise TypeError(f"no numbers: {values[:3]!r}"[:300])
        return np.asarray(values, dtype=np.float32)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise WeightSyncError(
            f"no log-probs of a fixed prompt in its answer: {error!r}",
            code="probe_logprobs_missing",
            where=endpoint.url,
            remedy="the server must be vLLM >= 0.26",
        ) from error


def user_message(image: str) -> list[dict[str, Any]]:
    """Return a chat of one user message, which has the PNG `image` (in base64) and then the text `WORDS`."""
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": WORDS}]}]


# --- Check that a server holds the weights that it was given ---

CPU_FLOAT32, GPU_FLOAT32, SIXTEEN_BITS, EXPERTS_SIXTEEN_BITS, EIGHT_BITS = 1e-4, 1e-2, 0.1, 0.3, 0.5
"""Largest accepted difference (root mean square, in nats) between two answers to the probe, by device and dtype.

GPUs multiply fp32 as tf32; 135 M weights in 30 layers differed by 5.7e-3. The other values were measured on tiny
checkpoints, see docs/operations/servers.md. In 8 bits, 3.75 B random weights had a mismatch KL of 0.05, which is about
0.3 nats. In 16 bits a router near a tie chooses other experts: 128 random experts in four layers differed by 0.11 nats.
"""
FIRST = "the first server"


class SyncCheck:
    """Compare servers' answers to the probe with the expected answer of the current version.

    The expected answer is the trainer's. For a version without a trainer's answer, it is the answer of the first server
    that is checked.

    Args:
        experts: the model is a mixture of experts.
    """

    def __init__(self, probe: Probe, settings: ServerSettings, machine: Machine, experts: bool = False) -> None:
        self.probe, self._experts = probe, experts
        self._dtype, self._machine, self._quantized = settings.dtype, machine, settings.quantization is not None
        self._expected: tuple[int, ProbeAnswer, str] | None = None
        self._before: tuple[int, LogProbs, str] | None = None

    def expect(self, version: int, answer: ProbeAnswer, whose: str = "the trainer") -> None:
        """Set the answer to the probe that servers with weights of `version` should give. `whose` is its source in
        error messages."""
        if self._expected is not None and self._expected[0] != version:
            self._before = self._expected[0], self._expected[1].logprobs, self._expected[2]
        self._expected = version, answer, whose

    async def check(self, http: httpx.AsyncClient, replica: Replica, version: int) -> None:
        """Send the probe to a server that holds the weights of `version`, and compare its log-probs with the expected
        ones.

        Raises:
            WeightSyncError: the log-probs differ by more than the tolerance.
            httpx.TransportError: the server is gone.
        """
        values = await ask_probe(http, replica.endpoint, self.probe, replica.model)
        if self._expected is None or self._expected[0] != version:
            self.expect(version, ProbeAnswer(values, self._dtype), FIRST)
        assert self._expected is not None
        _, expected, whose = self._expected
        if len(values) != len(expected.logprobs):
            raise WeightSyncError(
                f"the server gave {len(values)} log-probs of the probe, {whose} gave {len(expected.logprobs)}",
                code="probe_length_mismatch",
                where=replica.name,
            )
        difference, tolerance = distance(values, expected.logprobs), self._tolerance(expected.dtype)
        if difference <= tolerance:
            return
        at = int(np.argmax(np.nan_to_num(np.abs(values - expected.logprobs), nan=np.inf)))
        what = (
            f"at version {version} the server does not hold the weights of {whose}: its log-probs of the probe differ "
            f"by {difference:.3g} nats (root mean square; {tolerance:g} is allowed), most at index {at} of "
            f"{len(values)}: {values[at]:.6g} instead of {expected.logprobs[at]:.6g}"
        )
        raise self._difference(what, values, expected.logprobs, tolerance, replica.name)

    def _tolerance(self, dtype: str) -> float:
        machine = self._machine
        if machine.servers.sync_tolerance is not None:
            return machine.servers.sync_tolerance
        if self._quantized:
            return EIGHT_BITS
        if {dtype, self._dtype} != {"float32"}:
            return EXPERTS_SIXTEEN_BITS if self._experts else SIXTEEN_BITS
        return GPU_FLOAT32 if machine.joins_servers or machine.gpus_of_server(0) else CPU_FLOAT32

    def _difference(
        self, what: str, values: LogProbs, expected: LogProbs, tolerance: float, where: str
    ) -> WeightSyncError:
        text = len(self.probe.tokens) - 1
        if not np.isfinite(values).all():
            return WeightSyncError(
                what,
                code="served_weights_not_finite",
                where=where,
                remedy="the weights are not finite: lower the learning rate and resume from an earlier checkpoint",
            )
        texts_agree = distance(values[:text], expected[:text]) <= tolerance
        if self._before is not None:
            version, before, whose = self._before
            # Only servers answered for the first version. If they see images differently from the trainer, the answer
            # to the image is as before, too.
            if distance(values, before) <= tolerance and not (whose == FIRST and texts_agree):
                return WeightSyncError(
                    what,
                    code="served_weights_old",
                    where=where,
                    remedy=f"the server still holds version {version}: its log says why it loaded nothing",
                )
        if texts_agree:
            return WeightSyncError(
                what,
                code="served_vision_weights_differ",
                where=where,
                remedy="log-probs agree on text and differ on an image: the server did not load the vision weights, or "
                "it processes images or attends to them differently from the trainer; its log lists weights that were "
                "not loaded",
            )
        return WeightSyncError(
            what,
            code="served_weights_differ",
            where=where,
            remedy="the server did not load some weights: read its log. A joined server on CPU keeps an old output "
            f"head if embeddings are tied and our plug-in is missing: pip install --no-deps {SERVED}. If it uses "
            "another dtype than the trainer, set inference.dtype or raise machine.servers.sync_tolerance",
        )


def distance(one: LogProbs, other: LogProbs) -> float:
    """Return the root mean square difference of two arrays; NaN if any value is NaN."""
    return float(np.sqrt(np.mean((one.astype(np.float64) - other) ** 2)))
