"""A trainer without a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from components.batches.table import read_batch
from components.contracts.numbers import read_floats
from components.contracts.rollouts import LogProbs
from components.inference.probe import Probe, ProbeAnswer
from components.rl.user_adapter import UserAdapter
from components.training.checkpoints import Checkpoints, identity
from components.training.learner import Learner
from components.training.loader import MicroBatchLoader
from components.training.probe import answer_probe
from components.training.publish import Publisher
from components.training.ranks import Ranks
from components.training.settings import TrainerSettings


class InProcessTrainer:
    """Answers as `TrainerClient` does, with the given model, which it trains in place.

    Args:
        processor: what is saved beside the weights, and reads the image of a probe.
        load: gives the micro-batches of a step their tensors.
        folder: gets `checkpoints/` and `processor/`.
    """

    alive = True

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        settings: TrainerSettings,
        *,
        temperature: float,
        forbidden_token_ids: Sequence[int],
        load: MicroBatchLoader | UserAdapter,
        folder: Path,
    ) -> None:
        self.identity = identity(model, settings, temperature=temperature)
        self._publisher = Publisher(model, processor, folder / "processor")
        self._processor, self._load = processor, load
        self.learner = Learner(
            model,
            settings,
            temperature=temperature,
            forbidden_token_ids=forbidden_token_ids,
            ranks=Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        )
        self._checkpoints = Checkpoints(
            folder / "checkpoints", self.identity, self.learner.ranks, settings.keep_checkpoints
        )
        self._metrics: dict[int, dict[str, float]] = {}

    def start(self) -> None: ...

    def restart(self) -> None: ...

    def stop(self) -> None: ...

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one. The number of steps that the weights contain."""
        if newest := self._checkpoints.newest:
            state = self._checkpoints.load(self.learner, newest)
            self._metrics = {int(step): read_floats(metrics) for step, metrics in state["metrics"].items()}
        return self.learner.steps_done

    def step(self, step: int, batch: Path) -> dict[str, float]:
        """Train on the batch in folder `batch`, once; the metrics of the step."""
        if step not in self._metrics:
            with self._load.batch():
                self._metrics[step] = self.learner.step(read_batch(batch), self._load)
        return dict(self._metrics[step])

    def score(self, batch: Path) -> list[LogProbs]:
        """For each sample of the batch (L,) log-probs of its trained tokens, 0 elsewhere."""
        with self._load.batch():
            return self.learner.score(read_batch(batch), self._load)

    def publish(self, folder: Path, version: int) -> None:
        """Write the weights to `folder` in the Hugging Face layout, atomically."""
        self._publisher.publish(self.learner.model, folder, self.learner.ranks)

    def probe(self, probe: Probe, version: int) -> ProbeAnswer:
        """What the weights answer."""
        precise = self._publisher.float32 and self.learner.settings.autocast == "none"
        logprobs = answer_probe(self.learner.policy, self._processor, probe)
        return ProbeAnswer(logprobs, "float32" if precise else "bfloat16")

    def save(self) -> Path:
        """Begin to write a checkpoint."""
        state = {"metrics": {str(step): metrics for step, metrics in self._metrics.items()}}
        return self._checkpoints.save(self.learner, state)

    def finish(self) -> None:
        """Wait until the last checkpoint is on the disk."""
        self._checkpoints.wait()
