"""Worker process of the trainer of robot policies by rewards: it carries out the client's commands on every rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.errors import ConfigurationError
from armature.components.robots.imitation.opening import open_model, prepare
from armature.components.robots.policies.family import family_at
from armature.components.robots.rl.chunk_learner import ActionChunkLearner
from armature.components.robots.rl.client import RobotRLTraining
from armature.components.robots.rl.learner import RobotRLLearner
from armature.components.robots.rl.likelihood import likelihood_of
from armature.components.robots.rl.loader import KEPT_BYTES, ActionChunkLoader
from armature.components.robots.rl.reward_weighted import RewardWeightedLearner
from armature.components.robots.rl.settings import GAE, RewardWeighted
from armature.components.robots.rl.table import ActionChunkSample, read_batch
from armature.components.training.checkpoints import identity
from armature.components.training.ranks import Ranks
from armature.components.training.service_settings import ServiceSettings
from armature.components.training.service_worker import Command, ServiceWorker


class RobotRLWorker(ServiceWorker):
    """One rank of the trainer.

    Raises:
        ConfigurationError: the KL term needs a copy of the initial policy, which a sharded trainer does not keep; or
            another setting does not fit the policy or a sharded trainer.
        DataError: the checkpoint is incomplete.
    """

    def __init__(self, settings: ServiceSettings, ranks: Ranks) -> None:
        training = RobotRLTraining.model_validate(settings.training)
        trainer, kind = training.trainer, family_at(training.policy)
        self._parts = kind.load_parts(training.policy)
        if settings.processes.sharding and trainer.kl_coefficient:
            raise ConfigurationError(
                "a trainer that shards the policy over ranks keeps no copy of the initial policy",
                code="start_not_kept",
                where="trainer.kl_coefficient, machine.trainer.sharding",
                remedy="train on one GPU, or on CPU processes without sharding, or leave kl_coefficient out",
            )
        imitates, policy = isinstance(trainer.objective, RewardWeighted), self._parts.settings
        if imitates and policy.n_action_steps < policy.chunk_size:
            raise ConfigurationError(
                f"the policy executes {policy.n_action_steps} of the {policy.chunk_size} actions of a chunk, but the "
                "objective reward_weighted learns whole chunks",
                code="answers_in_part",
                where="trainer.objective, policy.n_action_steps",
                remedy="train a policy with n_action_steps = chunk_size, or use the objective ppo",
            )
        quantization = training.rollouts.quantization if trainer.mode == "expert" else None
        if settings.processes.sharding and quantization is not None:
            raise ConfigurationError(
                "a trainer that shards the policy over ranks does not support 8-bit layers",
                code="quantization_not_split",
                where="rollouts.quantization, machine.trainer.sharding",
                remedy="train on one GPU, or leave rollouts.quantization out",
            )
        plan = kind.sampling_plan(policy, self._parts.config)
        of_tokens = training.rollouts.inference_action_mode == "discrete"

        def initialize(model: Any) -> None:
            prepare(model, trainer, policy.semantics)
            if quantization is not None:
                model.quantize_text("rollouts.quantization")
            if isinstance(trainer.advantage, GAE):
                model.add_value_head(trainer.seed, of_tokens)

        opened = self._opened = open_model(training.policy, self._parts, initialize, settings.processes, ranks)
        run_identity = None
        if ranks.first:
            run_identity = identity(opened.named, trainer, opened.weights, run=training.fingerprint)
        rollouts = training.rollouts
        self._load = ActionChunkLoader(
            self._parts.processor(),
            ImageStore(training.images),
            rollouts.inference_action_mode,
            trainer.packing,
            rollouts.flow_samples if rollouts.likelihood == "fpo" else None,
            imitates,
            KEPT_BYTES if trainer.loads_again else 0,
        )
        shared = self._load, ranks, opened.shard
        self.learner: ActionChunkLearner
        if imitates:
            self.learner = RewardWeightedLearner(opened.model, trainer, plan, policy.num_flow_timesteps, *shared)
        else:
            self.learner = RobotRLLearner(opened.model, trainer, likelihood_of(rollouts, plan), *shared)
        super().__init__(
            settings, self.learner, ranks.broadcast(run_identity), trainer.keep_checkpoints, trainer.max_steps
        )

    def prepare(self, command: Command) -> list[ActionChunkSample]:
        """Return the samples of the batch that the command names, or an empty list if it names no batch.

        Raises:
            DataError: the samples cannot be trained on.
        """
        if "batch" not in command:
            return []
        samples = read_batch(Path(command["batch"]))
        self._load.refuse(samples, command["batch"])
        return samples

    def train(self, command: Command, prepared: list[ActionChunkSample]) -> dict[str, float]:
        return self.learner.step(prepared)

    def perform(self, command: Command, prepared: list[ActionChunkSample]) -> Any:
        match command["name"]:
            case "score" if isinstance(self.learner, RobotRLLearner):
                return self.learner.score(prepared)
            case "publish":
                self._opened.publish(Path(command["folder"]), self._parts, self.ranks)
                self.ranks.broadcast(None)  # no rank replies before the checkpoint is written
                return None
            case other:
                raise ConfigurationError(f"the trainer has no command {other!r}", code="unknown_command")
