"""Settings of sampling, and the settings of servers that change which tokens are sampled."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from armature.components.contracts.settings import Settings


class SamplingSettings(Settings):
    """Sampling of completions for training.

    Only temperature and length can be set. Importance ratios divide the trainer's softmax(logits / temperature) by the
    distribution that was sampled from. Any other option would change only the distribution that was sampled from
    (top_p = 0.5 gives a mean ratio of 0.50 instead of 1).
    """

    top_p: ClassVar[float] = 1.0
    top_k: ClassVar[int] = 0

    temperature: float = Field(1.0, gt=0, le=2)
    """Softmax temperature; the trainer divides its logits by the same number."""
    max_tokens: int = Field(gt=0)
    """Longest completion of one turn, in tokens."""


class EvaluationSamplingSettings(Settings):
    """Sampling of completions for evaluation, which computes no importance ratios and allows any distribution."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Softmax temperature; 0 is greedy: the likeliest token at every step."""
    max_tokens: int = Field(gt=0)
    """Longest completion of one turn, in tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0 keeps all."""

    @model_validator(mode="after")
    def _check_greedy(self) -> Self:
        if self.temperature == 0 and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError(
                "temperature = 0 takes the likeliest token: top_p and top_k have no effect, leave them out"
            )
        return self


class ServerSettings(Settings):
    """Settings of a vLLM server that change what it samples."""

    max_model_len: int = Field(ge=16)
    """Longest prompt and completion together, in tokens."""
    max_images_per_prompt: int = Field(16, ge=0)
    """Most images in one prompt, including the images of earlier turns. The limit takes no memory."""
    max_videos_per_prompt: int = Field(0, ge=0)
    """Most videos in one prompt, including the videos of earlier turns; families with videos are in docs/models.md."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the served weights; log-probs agree best with the trainer's own."""
    quantization: Literal["fp8"] | None = None
    """fp8: compute the matrix products of text layers in 8 bits, with scales per output channel of weights and per
    token of activations. Needs servers on GPUs, and trainer.correction for training, because these servers sample from
    a different distribution than the trainer's."""
    replay_experts: bool = False
    """Servers return the experts that each token of a mixture of experts used, and the trainer uses the same ones. A
    run stops before its first step if this does not make trainer and servers agree better."""
    deterministic: bool | None = None
    """True: the bits of every answer depend only on its request and the weights, so that the same seed gives the same
    run on a busy machine too. It is an error if this is impossible. Unset: the same for servers that the run starts on
    CPU in float32, but with a warning instead of an error if the processor's results depend on the batch."""
