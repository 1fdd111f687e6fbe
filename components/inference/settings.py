"""What is sampled, and what the servers are told that changes it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from components.contracts.errors import ConfigurationError
from components.contracts.settings import Settings

_NEUTRAL: dict[str, tuple[float, str]] = {
    "top_p": (1.0, "cuts the tail of the distribution"),
    "top_k": (0, "keeps only the k likeliest tokens"),
    "min_p": (0.0, "drops unlikely tokens"),
    "repetition_penalty": (1.0, "changes the logits of tokens already seen"),
    "presence_penalty": (0.0, "changes the logits of tokens already seen"),
    "frequency_penalty": (0.0, "changes the logits of tokens already seen"),
}


class SamplingSettings(Settings):
    """How completions are sampled for training.

    Only temperature and length are free: importance ratios compare the trainer's softmax(logits / temperature)
    with the distribution that was sampled from, and every other knob changes the latter alone (top_p = 0.5
    gives a mean ratio of 0.50 where 1 is right).

    Raises:
        ConfigurationError: a setting that biases the ratios is not neutral.
    """

    temperature: float = Field(1.0, gt=0, le=2, description="Softmax temperature; the trainer divides by the same.")
    max_tokens: int = Field(gt=0, description="Longest completion of one turn, in tokens.")
    top_p: float = Field(1.0, description="Has to be 1: anything less biases importance ratios.")
    top_k: int = Field(0, description="Has to be 0 (off): anything else biases importance ratios.")
    min_p: float = Field(0.0, description="Has to be 0 (off): anything else biases importance ratios.")
    repetition_penalty: float = Field(1.0, description="Has to be 1 (off): else importance ratios are biased.")
    presence_penalty: float = Field(0.0, description="Has to be 0 (off): else importance ratios are biased.")
    frequency_penalty: float = Field(0.0, description="Has to be 0 (off): else importance ratios are biased.")

    @model_validator(mode="after")
    def _unbiased(self) -> SamplingSettings:
        for name, (neutral, harm) in _NEUTRAL.items():
            value = getattr(self, name)
            if value != neutral and not (name == "top_k" and value == -1):
                raise ConfigurationError(
                    f"{name} = {value} {harm}, so the log-probs that the server samples with are not those that "
                    "the trainer computes, and every importance ratio is biased",
                    where=f"sampling.{name}",
                    remedy=f"set {name} = {neutral:g} for training; evaluation may use other values",
                )
        return self


class EvaluationSamplingSettings(Settings):
    """How completions are sampled for evaluation, where no ratio is computed and any distribution will do."""

    temperature: float = Field(
        1.0, ge=0, le=2, description="Softmax temperature; 0 is greedy: the likeliest token at every step."
    )
    max_tokens: int = Field(gt=0, description="Longest completion of one turn, in tokens.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Sample from the smallest set of tokens with this probability; 1 keeps all."
    )
    top_k: int = Field(0, ge=0, description="Sample from this many of the likeliest tokens; 0 keeps all.")


class ServerSettings(Settings):
    """What a vLLM server is told that changes what it samples."""

    max_model_len: int = Field(ge=16, description="Longest prompt and completion together, in tokens.")
    max_images_per_prompt: int = Field(1, ge=0, description="Images in one prompt, those of earlier turns included.")
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        "bfloat16", description="Data type of the served weights; log-probs agree best with the trainer's own."
    )
    deterministic: bool | None = Field(
        None,
        description="Whether an answer's bits depend on its request and the weights alone, so that the same seed gives "
        "the same run, whatever else the machine does. Left out: on CPU in float32, for servers of the pool's own, "
        "with a warning where the processor does not keep it. True is refused where it cannot be promised.",
    )
