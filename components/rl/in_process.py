"""A trainer without a process of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn

from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import not_sent
from armature.components.training.checkpoints import identity
from armature.components.training.client import ResultT
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import service_settings
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from armature.components.vlm.learner import Learner
from armature.components.vlm.publish import Publisher
from armature.components.vlm.worker import Loader, TokenWorker


class InProcessTrainer(TrainerClient):
    """A client of a worker in this process, which trains the given model in place. It lives as long as this process.

    Args:
        processor: what is saved beside the weights, and reads the image of a probe.
        load: gives the micro-batches of a step their tensors.
        folder: gets `checkpoints/` and `processor/`.
    """

    def __init__(
        self,
        model: nn.Module,
        processor: Any,
        policy: TrainerPolicySettings,
        *,
        forbidden_token_ids: Sequence[int],
        load: Loader,
        machine: Machine,
        folder: Path,
    ) -> None:
        self.machine, self.settings = machine, service_settings(policy, machine, folder)
        self._saved = not_sent
        who = identity(model, policy.trainer, temperature=policy.temperature)
        publisher = Publisher(model, processor, folder / "processor")
        self.learner = Learner(
            model,
            policy.trainer,
            temperature=policy.temperature,
            forbidden_token_ids=forbidden_token_ids,
            ranks=Ranks(device=torch.device("cuda" if torch.cuda.is_available() else "cpu")),
        )
        self._worker = TokenWorker(self.settings, self.learner, processor, publisher, load, who)

    @property
    def alive(self) -> bool:
        return True

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def finish(self) -> None:
        self.settle()

    def _ask(self, name: str, timeout: float, result: TypeAdapter[ResultT], **arguments: Any) -> ResultT:
        command = {"name": name, **arguments}
        known = self._worker.recorded(command)
        return result.validate_python(
            self._worker.run(command, self._worker.check(command)) if known is None else known
        )
