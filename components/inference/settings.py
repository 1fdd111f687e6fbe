"""What is sampled, and what the servers are told that changes it."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from armature.components.contracts.settings import Settings


class SamplingSettings(Settings):
    """How completions are sampled for training.

    Only temperature and length are free: importance ratios compare the trainer's softmax(logits / temperature)
    with the distribution that was sampled from, and every other knob changes the latter alone (top_p = 0.5
    gives a mean ratio of 0.50 where 1 is right).
    """

    top_p: ClassVar[float] = 1.0
    top_k: ClassVar[int] = 0

    temperature: float = Field(1.0, gt=0, le=2)
    """Softmax temperature; the trainer divides by the same."""
    max_tokens: int = Field(gt=0)
    """Longest completion of one turn, in tokens."""


class EvaluationSamplingSettings(Settings):
    """How completions are sampled for evaluation, where no ratio is computed and any distribution will do."""

    temperature: float = Field(1.0, ge=0, le=2)
    """Softmax temperature; 0 is greedy: the likeliest token at every step."""
    max_tokens: int = Field(gt=0)
    """Longest completion of one turn, in tokens."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Sample from the smallest set of tokens with this probability; 1 keeps all."""
    top_k: int = Field(0, ge=0)
    """Sample from this many of the likeliest tokens; 0 keeps all."""

    @model_validator(mode="after")
    def _greedy_is_greedy(self) -> Self:
        if self.temperature == 0 and (self.top_p, self.top_k) != (1.0, 0):
            raise ValueError(
                "temperature = 0 takes the likeliest token: top_p and top_k have no effect, leave them out"
            )
        return self


class ServerSettings(Settings):
    """What a vLLM server is told that changes what it samples."""

    max_model_len: int = Field(ge=16)
    """Longest prompt and completion together, in tokens."""
    max_images_per_prompt: int = Field(1, ge=0)
    """Images in one prompt, those of earlier turns included."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type of the served weights; log-probs agree best with the trainer's own."""
    quantization: Literal["fp8"] | None = None
    """fp8: the products of the text layers are computed in 8 bits, weights scaled by output channel and activations by
    token. Needs servers on GPUs; training needs trainer.correction, for these servers sample from another distribution
    than the trainer's."""
    deterministic: bool | None = None
    """Whether an answer's bits depend on its request and the weights alone, so that the same seed gives the same run,
    whatever else the machine does. Left out: on CPU in float32, for servers of the pool's own, with a warning where the
    processor does not keep it. True is refused where it cannot be promised."""
