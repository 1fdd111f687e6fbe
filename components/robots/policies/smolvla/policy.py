"""SmolVLA as a `RobotPolicy`: predict chunks of actions, in the dataset's units, from observations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.robots import RobotObservation
from armature.components.robots.policies.norm_stats import Floats
from armature.components.robots.policies.settings import Quantization, RobotPolicySettings
from armature.components.robots.policies.smolvla.checkpoint import load_model, load_parts
from armature.components.robots.policies.smolvla.model import SmolVLA
from armature.components.robots.policies.smolvla.processor import SmolVLAExample, SmolVLAProcessor
from armature.components.robots.policies.source import refuse_short_chunk


@dataclass(frozen=True)
class PreparedObservation(RobotObservation):
    """An observation with the `example` that the policy's processor has encoded."""

    example: SmolVLAExample = field(kw_only=True)


class SmolVLAPolicy:
    """A SmolVLA model with its processor; implements the protocol `RobotPolicy`.

    On a CPU rows run one by one without padding. On a GPU they run in passes of `rows_per_pass` rows of one width;
    copies of a row fill the last one. So a row's actions do not depend on other rows.
    """

    most_previous_actions, undecoded = 0, 0

    def __init__(
        self,
        model: SmolVLA,
        processor: SmolVLAProcessor,
        settings: RobotPolicySettings,
        mode: Literal["continuous", "discrete"],
        rows: int,
    ) -> None:
        """
        Args:
            rows: Number of rows of a forward pass on a GPU, for any number of observations.

        Raises:
            ConfigurationError: `mode` is not continuous, or the policy executes more actions than it predicts.
        """
        if mode != "continuous":
            raise ConfigurationError(
                f"SmolVLA cannot predict {mode} actions",
                code="action_mode_mismatch",
                where="inference_action_mode",
                remedy="set inference_action_mode = 'continuous'",
            )
        refuse_short_chunk(settings)
        self.n_action_steps, self.action_dimensions = settings.n_action_steps, processor.action_dimensions
        self.cameras, self.state_dimensions = processor.cameras, processor.state_dimensions
        self._model, self._processor, self._settings = model.eval(), processor, settings
        self._device = next(model.parameters()).device
        self._padded = self._device.type == "cuda"
        self.rows_per_pass = rows if self._padded else 1
        self._steps = settings.num_inference_steps or model.config.num_steps

    def prepared(self, observation: RobotObservation) -> PreparedObservation:
        """Encode an observation ahead of its prediction."""
        return PreparedObservation(**vars(observation), example=self._processor.encode(observation))

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> Floats:
        """Predict chunks, row i from observation i and seed i: (N, n_action_steps, action dimensions) float32."""
        examples = [
            each.example if isinstance(each, PreparedObservation) else self._processor.encode(each)
            for each in observations
        ]
        shape = (self._settings.chunk_size, self._model.config.max_action_dim)
        noise = torch.stack([torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds])
        chunks, count = list[Floats](), self.rows_per_pass
        width = self._model.config.tokenizer_max_length if self._padded else 1
        for start in range(0, len(examples), count):
            rows = [min(start + slot, len(examples) - 1) for slot in range(count)]
            batch = self._processor.batch([examples[row] for row in rows], multiple=width).to(self._device)
            chunk = self._model.sample(batch, noise[rows].to(self._device), self._steps)
            chunks.append(chunk[: len(examples) - start].cpu().numpy())
        return self._processor.decode(np.concatenate(chunks))[:, : self.n_action_steps]

    def facts(self) -> dict[str, Any]:
        """Return the settings that describe this policy to a reader of logs, reports and the server's metadata."""
        return {
            "family": "smolvla",
            "chunk_size": self._settings.chunk_size,
            "dtype": self._settings.dtype,
            "inference_action_mode": "continuous",
            "n_action_steps": self.n_action_steps,
            "cameras": list(self.cameras),
        }


def open_policy(
    source: Path,
    mode: Literal["continuous", "discrete"],
    rows: int,
    torch_compile: bool = False,
    quantization: Quantization | None = None,
    refuse_undecoded: bool = False,
    n_action_steps: int | None = None,
    num_inference_steps: int | None = None,
    image_attention: str | None = None,
) -> SmolVLAPolicy:
    """Load the policy of an artifact or a checkpoint for inference, on the GPU if there is one.

    `refuse_undecoded` has no effect: there are no action tokens.

    Raises:
        ConfigurationError: the policy cannot act with these settings.
        DataError: the checkpoint is incomplete.
    """
    options: dict[str, Any] = {"torch_compile": torch_compile, "quantization": quantization}
    options["image_attention_at_inference"] = image_attention
    if unsupported := [name for name, value in options.items() if value]:
        raise ConfigurationError(
            f"SmolVLA does not support {', '.join(unsupported)}",
            code="policy_setting_unsupported",
            where=", ".join(f"evaluation.{name}" for name in unsupported),
            remedy="leave it out",
        )
    parts = load_parts(source)
    changes = {"n_action_steps": n_action_steps, "num_inference_steps": num_inference_steps}
    settings = parts.settings.model_copy(update={name: value for name, value in changes.items() if value is not None})
    model = load_model(source, parts, "cuda" if torch.cuda.is_available() else "cpu")
    return SmolVLAPolicy(model, parts.processor(), settings, mode, rows)
