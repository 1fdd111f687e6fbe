"""The commands of a trainer of policies by rewards, as every rank carries them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from components.artifacts.images import ImageStore
from components.contracts.errors import ConfigurationError
from components.policies.molmoact2.checkpoints.checkpoint import load_policy, save_policy
from components.policies.molmoact2.sampling import InferencePlan
from components.training.checkpoints import identity
from components.training.ranks import Ranks
from components.training.service_settings import ServiceSettings
from components.training.service_worker import Command, ServiceWorker
from components.vla.groups import prepare
from components.vla_rl.client import RobotRLTraining
from components.vla_rl.learner import RobotRLLearner
from components.vla_rl.likelihood import likelihood_of
from components.vla_rl.loader import AnswerLoader
from components.vla_rl.table import AnswerSample, read_batch


class RobotRLWorker(ServiceWorker):
    """One rank of a trainer of policies by rewards, which has all of the policy.

    Raises:
        ConfigurationError: the policy is to be split over GPUs.
        DataError: the checkpoint is not whole.
    """

    def __init__(self, settings: ServiceSettings, ranks: Ranks) -> None:
        training = RobotRLTraining.model_validate(settings.training)
        if settings.processes.sharding:
            raise ConfigurationError(
                "reinforcement learning of a policy trains on one GPU, or on CPU processes",
                where="machine.trainer_gpus, machine.trainer_nodes, machine.trainer_sharding",
                remedy="name one GPU at most, and one node, and no sharding",
            )
        loaded = load_policy(training.policy)
        self._parts = loaded.parts
        model = loaded.model
        prepare(model, training.trainer, loaded.settings.semantics)
        mode = training.rollouts.inference_action_mode
        self._load = AnswerLoader(loaded.processor(), ImageStore(training.images), mode)
        likelihood = likelihood_of(training.rollouts, InferencePlan.of(loaded.settings, loaded.config))
        self.learner = RobotRLLearner(model, training.trainer, likelihood, self._load, ranks)
        who = identity(model, training.trainer, run=training.fingerprint)
        super().__init__(
            settings, self.learner, ranks.broadcast(who), training.trainer.keep_checkpoints, training.trainer.max_steps
        )

    def prepare(self, command: Command) -> list[AnswerSample]:
        """The samples that the command names, if any.

        Raises:
            DataError: they cannot be trained on.
        """
        if "batch" not in command:
            return []
        samples = read_batch(Path(command["batch"]))
        self._load.refuse(samples, command["batch"])
        return samples

    def train(self, command: Command, prepared: list[AnswerSample]) -> dict[str, float]:
        return self.learner.step(prepared)

    def perform(self, command: Command, prepared: list[AnswerSample]) -> Any:
        match command["name"]:
            case "score":
                return self.learner.score(prepared)
            case "publish":
                if self.ranks.first:
                    save_policy(Path(command["folder"]), self._parts, self.learner.model.state_dict())
                self.ranks.broadcast(None)  # none answers before it is written
                return None
            case other:
                raise ConfigurationError(f"the trainer has no command {other!r}")
