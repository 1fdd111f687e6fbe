"""The client of a trainer of tokens. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, PositiveFloat, TypeAdapter

from armature.components.inference.probe import Probe, ProbeAnswer
from armature.components.inference.replies import Endpoint
from armature.components.machine.workers.requests import ANYTHING
from armature.components.models.settings import ModelSettings
from armature.components.training.client import ServiceClient
from armature.components.vlm.settings import TrainerSettings


class ProbeReply(BaseModel):
    """The fields of a `ProbeAnswer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    logprobs: list[float]
    dtype: str


SCORES, PROBE = TypeAdapter(list[list[float]]), TypeAdapter(ProbeReply)


class TrainerPolicySettings(BaseModel):
    """What decides the results of a trainer of tokens: which model, trained how, on which images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    WORKER: ClassVar[str] = "tokens"

    model_path: Path
    """Folder of the model that the run begins with."""
    model: ModelSettings
    trainer: TrainerSettings
    temperature: PositiveFloat
    """Temperature of the sampler."""
    images: Path
    """Root of the image store."""

    @property
    def seed(self) -> int:
        return self.trainer.seed


class TrainerClient(ServiceClient):
    """A trainer of tokens: `training` is a `TrainerPolicySettings`."""

    def step(self, step: int, batch: Path, log_ratios: Path | None = None) -> dict[str, float]:
        """Train on the batch in folder `batch` as step `step` = 1, 2, ...; the metrics of the step.

        A step is applied once: asking again returns the same metrics.

        Args:
            log_ratios: a file to write, of the trained tokens; see `armature.components.rollouts.batches.ratios`.
        """
        files = {"log_ratios": str(log_ratios.resolve())} if log_ratios is not None else {}
        return self._train(step, batch=str(batch.resolve()), **files)

    def score(self, batch: Path) -> list[npt.NDArray[np.float32]]:
        """For each sample of the batch (L,) log-probs of its trained tokens, 0 elsewhere."""
        scores = self._ask("score", self.machine.train_timeout, SCORES, batch=str(batch.resolve()))
        return [np.array(score, dtype=np.float32) for score in scores]

    def publish_version(self, folder: Path, version: int, form: Literal["delta", "adapter"]) -> None:
        """Write the weights after step `version` to `folder`, one of a series, atomically, for servers.

        Args:
            form: what changed since the last version, or all where that is not much less; or the adapters alone, as
                PEFT loads them.

        Raises:
            ConfigurationError: the weights are of another version, or have no adapters.
        """
        command = {"folder": str(folder.resolve()), "version": version, "form": form}
        self._ask("publish", self.machine.train_timeout, ANYTHING, **command)

    def send(self, endpoints: Sequence[Endpoint], version: int) -> None:
        """Send the weights after step `version` from the trainer's GPUs to vLLM servers, all of them together.

        They are those that `publish` would write, under the same names. The servers must expect it: see
        `armature.components.inference.pool.ServerPool.sync`. Asking again sends again.

        Raises:
            ConfigurationError: the weights are of another version, or `machine.weight_transfer` needs no sender.
            WeightSyncError: a server refused them.
        """
        addresses = [asdict(endpoint) for endpoint in endpoints]
        self._ask("send", self.machine.sync_timeout, ANYTHING, endpoints=addresses, version=version)

    def probe(self, probe: Probe, version: int) -> ProbeAnswer:
        """What the weights after step `version` answer; servers that hold them answer the same.

        Raises:
            ConfigurationError: the weights are of another version.
        """
        answer = self._ask("probe", self.machine.train_timeout, PROBE, probe=asdict(probe), version=version)
        return ProbeAnswer(np.array(answer.logprobs, dtype=np.float32), answer.dtype)
