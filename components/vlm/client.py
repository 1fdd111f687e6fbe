"""Client and settings of a trainer service for vision-language models. Torch-free."""

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
from armature.components.training.client import FLOATS, ServiceClient
from armature.components.vlm.settings import TeacherSettings, TrainerSettings

OUT_OF_MEMORY = "out_of_memory"
"""Name of a step's metric, 1 if activations are recomputed from this step on, because the memory was not enough."""
RECOMPUTES = "the memory is not enough for activations: from now on the backward pass computes them again"


class ProbeReply(BaseModel):
    """The reply of a trainer service to a probe. It has the fields of a `ProbeAnswer`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    logprobs: list[float]
    dtype: str


SCORES, PROBE = TypeAdapter(list[list[float]]), TypeAdapter(ProbeReply)


class TrainerPolicySettings(BaseModel):
    """The settings on which the results of a training depend: the model, the trainer, and the images."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    WORKER: ClassVar[str] = "tokens"

    model_path: Path
    """Folder of the initial model."""
    model: ModelSettings
    trainer: TrainerSettings
    temperature: PositiveFloat
    """Temperature at which the tokens were sampled."""
    sampled: bool = True
    """True if the tokens come from servers, which never sample placeholders of images: those get probability 0."""
    images: Path
    """Root folder of the image store."""
    teacher: TeacherSettings | None = None
    """Settings of the teachers; None without a teacher."""
    teacher_paths: dict[str, Path] = {}
    """Folders of the teachers, by the kind of task that they score."""

    @property
    def seed(self) -> int:
        return self.trainer.seed


class TrainerClient(ServiceClient):
    """Client of a trainer service for vision-language models; its `training` is a `TrainerPolicySettings`."""

    def step(self, step: int, batch: Path, log_ratios: Path | None = None) -> dict[str, float]:
        """Train on the batch in folder `batch` as step `step` = 1, 2, ... and return the step's metrics.

        A step is applied once: calling again with the same step returns the same metrics.

        Args:
            log_ratios: a file to which the log-ratios of the trained tokens are written; see
                `armature.components.rollouts.batches.ratios`.
        """
        files = {"log_ratios": str(log_ratios.resolve())} if log_ratios is not None else {}
        return self._train(step, batch=str(batch.resolve()), **files)

    def score(self, batch: Path) -> list[npt.NDArray[np.float32]]:
        """Return for each sample of the batch the log-probs (L,) of its trained tokens, 0 elsewhere."""
        scores = self._ask("score", self.machine.limits.train_timeout, SCORES, batch=str(batch.resolve()))
        return [np.array(score, dtype=np.float32) for score in scores]

    def teach(self, batch: Path, into: Path, kind: str = "") -> None:
        """Write the batch with the scores of the teacher of a kind of task to the folder `into`. Calling again writes
        it again."""
        folders = {"batch": str(batch.resolve()), "folder": str(into.resolve())}
        self._ask("teach", self.machine.limits.train_timeout, ANYTHING, **folders, kind=kind)

    def evaluate(self, batch: Path) -> dict[str, float]:
        """Return the loss and the token accuracy of the batch; see `Learner.evaluate`."""
        return self._ask("evaluate", self.machine.limits.train_timeout, FLOATS, batch=str(batch.resolve()))

    def publish_version(self, folder: Path, version: int, form: Literal["delta", "adapter"]) -> None:
        """Write the weights after step `version` to `folder` for servers, atomically, as one of a series of versions.

        Args:
            form: "delta" writes the changes since the last version, or a complete checkpoint if these are not much
                smaller; "adapter" writes only the adapters, as PEFT loads them.

        Raises:
            ConfigurationError: the trainer has another version of the weights, or the model has no adapters.
        """
        command = {"folder": str(folder.resolve()), "version": version, "form": form}
        self._ask("publish", self.machine.limits.train_timeout, ANYTHING, **command)

    def send(self, endpoints: Sequence[Endpoint], version: int) -> None:
        """Send the weights after step `version` from the trainer's GPUs to all given vLLM servers at once.

        The tensors are the same, under the same names, as `publish` would write. The servers must be waiting for them;
        see `armature.components.inference.pool.ServerPool.sync`. Calling again sends again.

        Raises:
            ConfigurationError: the trainer has another version of the weights, or `machine.servers.weight_transfer`
                does not use a sender.
            WeightSyncError: a server refused the weights.
        """
        addresses = [asdict(endpoint) for endpoint in endpoints]
        self._ask("send", self.machine.limits.sync_timeout, ANYTHING, endpoints=addresses, version=version)

    def probe(self, probe: Probe, version: int) -> ProbeAnswer:
        """Return the log-probs that the weights after step `version` give to `probe`, to compare with a server's.

        Raises:
            ConfigurationError: the trainer has another version of the weights.
        """
        answer = self._ask("probe", self.machine.limits.train_timeout, PROBE, probe=asdict(probe), version=version)
        return ProbeAnswer(np.array(answer.logprobs, dtype=np.float32), answer.dtype)
