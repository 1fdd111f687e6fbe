"""A fixed question. What a model answers to it shows which weights it has: a trainer and its servers answer alike."""

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
from armature.components.contracts.rollouts import LogProbs
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.endpoint import Endpoint
from armature.components.inference.weights.base import post

TOKENS = 128
LIKELIEST = 20
"""Log-probs of one position that vLLM gives (its default max_logprobs)."""
WORDS = "Describe it."


@dataclass(frozen=True)
class Probe:
    """`tokens` (L,): a text of random tokens, each once. `image`: the PNG of a user's message that ends in `WORDS`, in
    base64; "" where the servers take no images.

    The answer is (L-1,) log-probs of the text after its first token, then the `LIKELIEST` greatest, falling, of what
    follows the message; all at temperature 1 and without forbidden tokens. Every row of the output head is in each,
    and where the head chooses among few tokens after training, the text still has unlikely ones.
    """

    tokens: tuple[int, ...]
    image: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "tokens", tuple(self.tokens))  # a list, where it came as JSON

    def pil_image(self) -> Image.Image:
        return Image.open(io.BytesIO(base64.b64decode(self.image))).convert("RGB")


@dataclass(frozen=True, eq=False)
class ProbeAnswer:
    """`logprobs` as `Probe` says; `dtype` is the least precise that the weights or the products had."""

    logprobs: LogProbs
    dtype: str


def make_probe(vocabulary: int, forbidden: Sequence[int], max_tokens: int, images: bool) -> Probe:
    """Of at most `max_tokens` tokens of text, each less than `vocabulary`; the same whoever makes it."""
    random = np.random.default_rng(0)
    drawn = random.choice(vocabulary, min(vocabulary, TOKENS + len(forbidden)), replace=False)
    tokens = [token for token in drawn.tolist() if token not in forbidden][: min(TOKENS, max_tokens)]
    return Probe(tuple(tokens), random_image(random, 64, 48) if images else "")


def random_image(random: np.random.Generator, width: int, height: int) -> str:
    """A PNG of random pixels, in base64."""
    file = io.BytesIO()
    Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


async def ask_probe(http: httpx.AsyncClient, endpoint: Endpoint, probe: Probe, model: str = MODEL_NAME) -> LogProbs:
    """What a server answers, with the weights that it calls `model`.

    Raises:
        WeightSyncError: it refuses, or answers with anything else.
        httpx.TransportError: it is gone.
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
    """A message with a PNG in base64 and `WORDS`, as the chat route wants it."""
    shown = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{image}"}}
    return [{"role": "user", "content": [shown, {"type": "text", "text": WORDS}]}]
