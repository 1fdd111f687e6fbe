"""`MultimodalGRPOTrainer`: the RL loop as a class, which trains a model in the caller's process."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import TerminalEvents, ThreadUnits
from armature.components.contracts.digests import document_digest
from armature.components.contracts.episodes import Environment
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.stages import StageContext
from armature.components.environments.make import environment_sources, make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.inference.command import placeholder_token_ids, vocabulary
from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import ServerSettings
from armature.components.models.adapters import FamilyAdapter, MultimodalAdapter, get_adapter
from armature.components.models.load import RECOMPUTATION, load_model, load_processor, save_checkpoint
from armature.components.models.settings import ModelSettings
from armature.components.models.source import locate
from armature.components.rl.config import MultimodalRLConfig
from armature.components.rl.evaluations import HeldoutSet
from armature.components.rl.in_process import InProcessTrainer, UserAdapter
from armature.components.rl.open import open_parts
from armature.components.rl.run import RunParts
from armature.components.rollouts.table import read_rollouts
from armature.components.vlm.client import TrainerPolicySettings
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.worker import Loader

JOINED = ServerSettings(max_model_len=2**20, max_images_per_prompt=0, dtype="bfloat16")
"""Settings of a server that somebody else started, of which nothing is known: limits as wide as possible, and the least
precise dtype."""
NOT_COMPARED = {"max_steps", "save_every", "keep_checkpoints"}
"""Trainer settings that may change when a run resumes, because rollouts do not depend on them."""


class MultimodalGRPOTrainer:
    """Trains a vision-language model by reinforcement learning in this process.

    It runs the same loop as the flow `train-vlm`. Trainer and server must agree on log-probs before the first step.
    Rollouts and batches are stored in `config.folder`, so a run that was stopped resumes from its newest checkpoint
    with the rollouts and batches since then. With `config.eval_steps` it plays held-out tasks between steps.

    Dropout is turned off, whatever the model's configuration says, and trained weights are kept in fp32.

    Args:
        model: a transformers model, with or without PEFT adapters, or a folder to load one from.
        tokenizer: the model's processor or tokenizer; by default the processor in the model's folder.
        adapter: turns rollouts into batches; by default the adapter of the model's family, which needs a processor.
        config: all other options.

    Raises:
        ConfigurationError: `config` is missing, or there is no adapter for the model.
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        tokenizer: Any = None,
        adapter: MultimodalAdapter | None = None,
        config: MultimodalRLConfig | None = None,
    ) -> None:
        if config is None:
            raise ConfigurationError(
                "MultimodalGRPOTrainer needs a config",
                code="config_missing",
                remedy="pass config=MultimodalRLConfig(...)",
            )
        torch.manual_seed(config.seed)
        self.config, self.machine, self.served = config, config.machine, JOINED
        self.store = ArtifactStore(config.folder / "store")
        self.images = ImageStore(self.store.images)
        self.environment: Environment | None = None
        self._examined: Environment | None = None
        network, self.tokenizer, self._weights = self._loaded(model, tokenizer)
        tqdm.write("Initializing MultimodalGRPOTrainer")
        self.adapter = adapter or get_adapter(self._weights, self.tokenizer, self.images.open)
        self._key = ""
        if isinstance(self.adapter, FamilyAdapter):
            self.adapter.images = self.adapter.images or self.images.open
            self.forbidden = tuple(sorted(self.adapter.collator.forbidden_token_ids))
            self._samples: FamilyAdapter | UserAdapter = self.adapter
            load: Loader = MicroBatchLoader(self.adapter.collator, self.images, workers=0)
        else:
            if config.packing:
                raise ConfigurationError(
                    f"{type(self.adapter).__name__} builds complete batches, whose rows cannot be packed",
                    code="batches_not_packable",
                    where="MultimodalRLConfig.packing",
                    remedy="omit packing, or omit the adapter if the model's family has one",
                )
            self.forbidden = placeholder_token_ids(self._weights)
            self._samples = load = UserAdapter(self.adapter, config.micro_batch_size, self._rollouts)
        policy = TrainerPolicySettings(
            model_path=self._weights,
            model=self._model_settings(self._weights),
            trainer=config.settings().trainer,
            temperature=config.temperature,
            images=self.images.root,
        )
        self._trainer = InProcessTrainer(
            network,
            self.tokenizer,
            policy,
            forbidden_token_ids=self.forbidden,
            load=load,
            machine=self.machine,
            folder=config.folder,
        )

    def _loaded(self, model: nn.Module | str | Path, tokenizer: Any) -> tuple[Any, Any, Path]:
        """Return the model, its processor or tokenizer, and a folder that has both.

        If `model` is a folder, the model is loaded from it.
        """
        if not isinstance(model, str | Path):
            network: Any = model
            if self.config.gradient_checkpointing:
                network.gradient_checkpointing_enable(gradient_checkpointing_kwargs=RECOMPUTATION)
            return network, tokenizer, save_checkpoint(network, tokenizer, self.config.folder / "model")
        tqdm.write(f"Loading VLM: {model}")
        settings = self._model_settings(model)
        return load_model(model, settings), tokenizer or load_processor(model, settings), locate(model)

    def _model_settings(self, source: str | Path) -> ModelSettings:
        checkpointing = self.config.gradient_checkpointing
        return ModelSettings(source=str(source), dtype="float32", gradient_checkpointing=checkpointing)

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self._trainer.learner.model

    def set_environment(self, environment: str | Environment, **args: Any) -> None:
        """Set the environment to train on.

        Args:
            environment: the name of a registered environment, or an instance. An instance is also used for evaluations;
                for a name, evaluations get an instance of their own.
            args: settings of a registered environment.
        """
        if not isinstance(environment, str):
            self.environment, self._examined, kind = environment, environment, type(environment)
            self._played: Any = f"{kind.__module__}.{kind.__qualname__}"
            return
        tqdm.write(f"Loading environment: {environment}")
        settings = EnvironmentSettings(
            name=environment,
            args=args,
            train_tasks=self.config.env_tasks,
            heldout_tasks=self.config.eval_tasks if self.config.eval_steps else 1,
            seed=self.config.seed,
        )
        self.environment, self._examined = make_environment(settings), make_environment(settings.for_evaluation())
        self._played = settings.model_dump(mode="json") | environment_sources(settings)

    def train(self) -> dict[str, float]:
        """Train until step `max_steps`, from the newest checkpoint if there is one, and return the last step's metrics.

        Raises:
            ConfigurationError: no environment is set.
            MismatchError: trainer and server do not agree on log-probs.
            ServerError: the server does not answer, or does not accept new weights.
        """
        config, settings = self.config, self.config.settings()
        if self.environment is None:
            if not config.env_id:
                raise ConfigurationError(
                    "no environment is set", code="environment_missing", remedy="call set_environment, or set env_id"
                )
            self.set_environment(config.env_id, **config.env_args)
        assert self.environment is not None
        made_from = settings.model_dump(mode="json", exclude={"preflight": True, "trainer": NOT_COMPARED})
        played = [made_from, self._played, config.primary_reward_key]
        if (heldout := config.heldout_set()) is not None:
            played.append(heldout.model_dump(mode="json", exclude={"patience"}))
        self._key = document_digest(played)[:20]
        assert self._examined is not None
        with (
            closing(self.environment) as environment,
            closing(self._examined) as examined,
            closing(_StepLines(config.log_every_steps)) as events,
        ):
            parts = RunParts(
                environment=environment,
                tasks=list(environment.tasks("train")),
                adapter=self._samples,
                tokenizer=getattr(self.tokenizer, "tokenizer", self.tokenizer),
                vocabulary=vocabulary(self._weights),
                servers=self._pool(self._weights),
                trainer=self._trainer,
                digests={},
                sync_every=config.sync_to_vllm_every,
                rewarded=self._rewarded,
                heldout=self._heldout_set(examined),
            )
            context = StageContext(self.machine, events, ThreadUnits(), config.folder, self.store.images, self._key)
            with (
                self.store.lock("train", self._key),
                open_parts(settings, context, self.store, parts) as (run, done),
            ):
                tqdm.write("Server is up!\nStarting training...")
                run.finish(config.folder / "final", run.train_from(done))
                return run.history.read()[-1]

    def _pool(self, weights: Path) -> ServerPool:
        logs = self.config.folder / "logs"
        return ServerPool(weights, self.served, self.machine, logs, forbidden_token_ids=self.forbidden)

    def _heldout_set(self, environment: Environment) -> HeldoutSet | None:
        """Return the tasks and settings of evaluations; None without evaluations.

        Raises:
            ConfigurationError: the environment has no held-out tasks.
        """
        if (plan := self.config.heldout_set()) is None:
            return None
        tasks = list(islice(environment.tasks("heldout"), plan.heldout_tasks))
        if not tasks:
            raise ConfigurationError(
                "the environment has no held-out tasks to evaluate with",
                code="heldout_tasks_missing",
                where="eval_steps",
                remedy='return some from tasks("heldout"), or omit eval_steps',
            )
        return HeldoutSet(plan, tasks, environment, {})

    def _rollouts(self, step: int) -> GenerateOutputs:
        return read_rollouts(self.store.home("rollouts", f"{self._key}-{step:05d}"))

    def _rewarded(self, outputs: GenerateOutputs) -> GenerateOutputs:
        """Return the rollouts with the rewards and groups that training uses.

        The reward is the part that is trained on. A group has the episodes whose rewards are compared.
        """
        return replace(outputs, trajectories=tuple(self._of_part(one) for one in outputs.trajectories))

    def _of_part(self, trajectory: Trajectory) -> Trajectory:
        if self.config.group_size == 1:
            trajectory = replace(trajectory, group_id="step")
        key = self.config.primary_reward_key
        if key is None:
            return trajectory
        if key not in trajectory.reward_parts:
            raise ConfigurationError(
                f"the environment does not return a reward part {key!r}",
                code="unknown_reward_part",
                where="primary_reward_key",
                remedy=f"choose from {', '.join(sorted(trajectory.reward_parts))}",
            )
        turns = tuple(replace(turn, reward=turn.reward_parts.get(key, 0.0)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns)


class _StepLines(TerminalEvents):
    """Prints a line of metrics for every `every`-th step, in addition to progress bars."""

    def __init__(self, every: int) -> None:
        super().__init__()
        self._every = every

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        super().progress(name, done, total, **postfix)
        if name == "Training" and postfix and (done % self._every == 0 or done in (1, total)):
            self.message(f"Step {done}/{total}: " + ", ".join(f"{key}={value:.4g}" for key, value in postfix.items()))
