"""`MultimodalGRPOTrainer`: the whole loop in one process, against a vLLM server that is already up."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from components.adapters import FamilyAdapter, MultimodalAdapter, get_adapter
from components.artifacts.images import ImageStore
from components.batches.advantages import turn_advantages
from components.batches.build import build_batch
from components.batches.settings import BatchSettings, GroupMean, PenaltySettings
from components.contracts.batches import MultimodalBatch, Sample
from components.contracts.episodes import Environment
from components.contracts.errors import ConfigurationError, DataError
from components.contracts.machine import Machine
from components.contracts.numbers import dump_json
from components.contracts.rollouts import GenerateOutputs, Trajectory
from components.environments.make import make_environment
from components.environments.settings import EnvironmentSettings
from components.inference.checkpoint import placeholder_token_ids
from components.inference.pool import ServerPool
from components.inference.probe import ProbeAnswer
from components.inference.settings import SamplingSettings, ServerSettings
from components.models.load import load_model, load_processor
from components.models.settings import ModelSettings
from components.rollouts.collect import collect
from components.rollouts.schedule import tasks_of_step
from components.training import checkpoints
from components.training.config import MultimodalRLConfig
from components.training.learner import Learner
from components.training.loader import MicroBatchLoader
from components.training.null_events import NullEvents
from components.training.probe import answer_probe
from components.training.publish import Publisher
from components.training.ranks import Ranks

SHOWN = {"loss": "loss", "ir": "importance_ratio", "ent": "entropy", "kl": "mismatch_kl", "rew": "reward/mean"}
"""Keys of the progress bar, and the metrics behind them."""
_GROUPS = BatchSettings(
    advantage=GroupMean(name="group_mean", scale="none"),
    penalty=PenaltySettings(format=0.0, inadmissible=0.0),
    skip_zero_advantage=False,
    max_sequence_tokens=2**31 - 1,
)


class MultimodalGRPOTrainer:
    """Trains a vision-language model on rollouts of its own, step by step, in this process.

    Args:
        model: a transformers model (with PEFT adapters or without), or a folder to load one from.
        tokenizer: the model's processor, or its tokenizer; None with a folder: the folder's processor.
        adapter: rollouts to batches; None: the one of the model's family, which needs a processor.
        config: everything else.

    Whatever the model's configuration says, dropout is off, and what is trained is kept in fp32. Runs continue from
    the newest checkpoint in `config.folder`.

    Raises:
        ConfigurationError: `config` is missing, or no adapter fits the model.
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
                "MultimodalGRPOTrainer needs a config", remedy="pass config=MultimodalRLConfig(...)"
            )
        torch.manual_seed(config.seed)
        self.config = config
        self.images = ImageStore(config.folder / "images")
        network, tokenizer = self._loaded(model, tokenizer)
        tqdm.write("Initializing MultimodalGRPOTrainer")
        self.tokenizer = tokenizer
        where = Path(model) if isinstance(model, str | Path) else str(network.config.model_type)
        self.adapter = adapter or get_adapter(where, tokenizer, self.images.open)
        if isinstance(self.adapter, FamilyAdapter) and self.adapter.images is None:
            self.adapter.images = self.images.open
        network.config.save_pretrained(config.folder / "model")
        self.forbidden = placeholder_token_ids(config.folder / "model")
        if isinstance(self.adapter, FamilyAdapter):
            self.forbidden = tuple(sorted(self.adapter.collator.forbidden_token_ids))
            self._load = MicroBatchLoader(self.adapter.collator, self.images, workers=0)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        trainer = config.trainer_settings()
        self._identity = checkpoints.identity(network, trainer, temperature=config.temperature)
        self._publisher = Publisher(network, tokenizer, config.folder / "processor")
        self.learner = Learner(
            network,
            trainer,
            temperature=config.temperature,
            forbidden_token_ids=self.forbidden,
            ranks=Ranks(device=device),
        )
        self.environment: Environment | None = None

    def _loaded(self, model: nn.Module | str | Path, tokenizer: Any) -> tuple[Any, Any]:
        """The model, read from its folder if it is not one yet, and what tokenizes for it."""
        config = self.config
        if not isinstance(model, str | Path):
            network: Any = model
            if config.gradient_checkpointing:
                network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            return network, tokenizer
        tqdm.write(f"Loading VLM: {model}")
        settings = ModelSettings(
            source=str(model),
            dtype="float32",
            attn_implementation="sdpa",
            trust_remote_code=False,
            freeze=(),
            gradient_checkpointing=config.gradient_checkpointing,
        )
        return load_model(model, settings), tokenizer or load_processor(model, settings)

    @property
    def model(self) -> Any:
        """The model that is trained."""
        return self.learner.model

    def set_environment(self, environment: str | Environment, **args: Any) -> None:
        """Train on a registered environment with its settings `args`, or on one that is made already."""
        if not isinstance(environment, str):
            self.environment = environment
            return
        tqdm.write(f"Loading environment: {environment}")
        factory_settings = EnvironmentSettings(
            name=environment, args=args, train_tasks=self.config.env_tasks, heldout_tasks=1, seed=self.config.seed
        )
        self.environment = make_environment(factory_settings)

    def step(self, data: MultimodalBatch | Sequence[MultimodalBatch] | Sequence[Sample]) -> dict[str, float]:
        """One training step on samples (with advantages) or on ready batches; its metrics.

        Samples are packed into micro-batches by their tokens; a batch is one forward pass as it is. Batches without
        advantages get A_i = R_i - mean R over all of them.
        """
        if isinstance(data, MultimodalBatch):
            return self.learner.step_on([data])
        if all(isinstance(one, MultimodalBatch) for one in data):
            return self.learner.step_on([one for one in data if isinstance(one, MultimodalBatch)])
        with self._load.batch():
            return self.learner.step([one for one in data if isinstance(one, Sample)], self._load)

    def train(self) -> dict[str, float]:
        """Run to `max_steps`, from the newest checkpoint if there is one; the metrics of the last step.

        Raises:
            ConfigurationError: no environment is set.
            ServerError: the server is not up, or does not take new weights.
            DataError: no rollout of a step can be trained on.
        """
        if self.environment is None:
            if not self.config.env_id:
                raise ConfigurationError("no environment is set", remedy="call set_environment, or set env_id")
            self.set_environment(self.config.env_id, **self.config.env_args)
        assert self.environment is not None
        with closing(self.environment) as environment:
            return asyncio.run(self._train(environment))

    async def _train(self, environment: Environment) -> dict[str, float]:
        config, metrics = self.config, dict[str, float]()
        done = self._resume()
        async with self._pool(self._publish(done), done) as pool:
            tqdm.write("Server is up!\nStarting training...")
            bar = tqdm(total=config.max_steps, initial=done, desc="Training")
            for step in range(done + 1, config.max_steps + 1):
                outputs = await self._collect(environment, pool, step)
                metrics = await asyncio.to_thread(self.step, self._batch(outputs))
                self._log(step, metrics, bar)
                if config.sync_to_vllm_every and step % config.sync_to_vllm_every == 0:
                    values = answer_probe(self.learner.policy, self.tokenizer, pool.weights.probe)
                    folder = await asyncio.to_thread(self._publish, step)
                    await pool.sync(folder, step, answer=ProbeAnswer(values, "bfloat16"))
                if step % config.save_steps == 0 or step == config.max_steps:
                    checkpoints.save(self.learner, config.folder / "checkpoints", {}, self._identity)
            bar.close()
        self._publisher.publish(self.model, config.folder / "final", self.learner.ranks)
        return metrics

    async def _collect(self, environment: Environment, pool: ServerPool, step: int) -> GenerateOutputs:
        config = self.config
        tasks = list(environment.tasks("train"))
        sampling = SamplingSettings(temperature=config.temperature, max_tokens=config.max_tokens)
        n_groups = config.rollouts_per_step // config.group_size
        outputs = await collect(
            environment,
            tasks_of_step(tasks, n_groups, step - 1, config.seed),
            config.group_size,
            pool,
            self.images,
            sampling,
            step=step,
            seed=config.seed,
            machine=self._machine(),
            events=NullEvents(),
        )
        return replace(outputs, trajectories=tuple(self._rewarded(one) for one in outputs.trajectories))

    def _rewarded(self, trajectory: Trajectory) -> Trajectory:
        """With the reward part that is trained on, and in the group that it is compared with."""
        if self.config.group_size == 1:
            trajectory = replace(trajectory, group_id="step")
        key = self.config.primary_reward_key
        if key is None:
            return trajectory
        if key not in trajectory.reward_parts:
            raise ConfigurationError(
                f"the environment gives no reward part {key!r}",
                where="primary_reward_key",
                remedy=f"choose from {', '.join(sorted(trajectory.reward_parts))}",
            )
        turns = tuple(replace(turn, reward=turn.reward_parts.get(key, 0.0)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns)

    def _batch(self, outputs: GenerateOutputs) -> Sequence[Sample] | Sequence[MultimodalBatch]:
        if not outputs.trajectories:
            raise DataError(f"no rollout was finished: {outputs.drops}", remedy="read the server's log")
        if isinstance(self.adapter, FamilyAdapter):
            return build_batch(outputs, self.adapter, _GROUPS).samples
        return self._built_by_hand(outputs)

    def _built_by_hand(self, outputs: GenerateOutputs) -> list[MultimodalBatch]:
        """Batches of an adapter that has only `build_batch`, a micro-batch of trajectories at a time.

        Where it makes one row per trajectory, rows are compared within their group, else with the whole step.
        """
        by_turn = turn_advantages(outputs.trajectories, _GROUPS).by_turn  # the same for all turns of a trajectory
        batches = []
        for start in range(0, len(outputs.trajectories), self.config.micro_batch_size):
            part = outputs.trajectories[start : start + self.config.micro_batch_size]
            batch = self.adapter.build_batch(GenerateOutputs(part))
            if batch.advantages is None and len(batch.rewards) == len(part):
                values = np.array([by_turn[one.trajectory_id, one.turns[0].index] for one in part], np.float32)
                batch.advantages = torch.from_numpy(values)[:, None] * batch.loss_mask
            batches.append(batch)
        return batches

    def _publish(self, step: int) -> Path:
        folder = self.config.folder / "weights" / f"{step:06d}"
        self._publisher.publish(self.model, folder, self.learner.ranks)
        return folder

    def _resume(self) -> int:
        newest = checkpoints.latest(self.config.folder / "checkpoints")
        if newest is not None:
            checkpoints.load(self.learner, newest, self._identity)
            tqdm.write(f"Resuming after step {self.learner.steps_done}")
        return self.learner.steps_done

    def _log(self, step: int, metrics: Mapping[str, float], bar: tqdm[Any]) -> None:
        config = self.config
        config.folder.mkdir(parents=True, exist_ok=True)
        with (config.folder / "metrics.jsonl").open("ab") as file:
            file.write(dump_json({"step": step, **metrics}) + b"\n")
        shown = {short: f"{metrics[name]:.4g}" for short, name in SHOWN.items() if name in metrics}
        if step % config.log_every_steps == 0 or step in (1, config.max_steps):
            bar.set_postfix(shown, refresh=False)
            tqdm.write(f"Step {step}/{config.max_steps}: " + ", ".join(f"{k}={v}" for k, v in shown.items()))
        bar.update()

    def _machine(self) -> Machine:
        return Machine(
            endpoints=(self.config.server_url,),
            ready_timeout=self.config.vllm_server_timeout,
            generation_timeout=self.config.generation_timeout,
            max_concurrent=self.config.max_concurrent,
        )

    def _pool(self, weights: Path, version: int) -> ServerPool:
        joined = ServerSettings(max_model_len=2**20, max_images_per_prompt=0, dtype="bfloat16")  # its own, at worst
        log_folder = self.config.folder / "servers"
        return ServerPool(
            weights, joined, self._machine(), log_folder, version=version, forbidden_token_ids=self.forbidden
        )
