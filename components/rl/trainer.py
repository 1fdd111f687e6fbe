"""`MultimodalGRPOTrainer`: the RL loop as a class, which trains a model in the caller's process."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from huggingface_hub import HfApi
from torch import nn
from tqdm import tqdm

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.problems import explained
from armature.components.configuration.stages import ThreadUnits
from armature.components.configuration.trackers import TrackerRun, refuse_missing_trackers, with_trackers
from armature.components.contracts.digests import document_digest
from armature.components.contracts.episodes import Environment
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.files import is_folder
from armature.components.contracts.machine import available_cpus
from armature.components.contracts.rollouts import GenerateOutputs, Trajectory
from armature.components.contracts.stages import StageContext
from armature.components.environments.make import environment_sources, make_environment
from armature.components.environments.mixture import with_tools
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.tools.box import ToolBox, tool_sources
from armature.components.inference.command import placeholder_token_ids, vocabulary
from armature.components.inference.pool import ServerPool
from armature.components.machine.hub import commit_of
from armature.components.models.adapters import FamilyAdapter, MultimodalAdapter, get_adapter
from armature.components.models.load import load_model, load_processor, recompute_activations, save_checkpoint
from armature.components.models.reserved_tokens import reserved_tokens
from armature.components.models.settings import ModelSettings
from armature.components.models.source import check_source_name, locate
from armature.components.rl.callbacks import TrainerEvents, TrainingResult, made_callbacks
from armature.components.rl.config import MultimodalRLConfig, refuse_unknown_arguments
from armature.components.rl.data import (
    WrittenData,
    WrittenParts,
    program_data,
    refuse_other_data,
    tasks_twice,
    unknown_reward_part,
)
from armature.components.rl.evaluations import HeldoutSet
from armature.components.rl.in_process import InProcessTrainer, UserAdapter, check_model, check_source
from armature.components.rl.open import open_parts
from armature.components.rl.program_machine import (
    JOINED,
    default_processes,
    joining,
    refuse_on_ranks,
    serving,
    with_ranks,
)
from armature.components.rl.run import RunParts
from armature.components.rollouts.table import read_rollouts
from armature.components.training.processes import TrainerProcesses
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from armature.components.vlm.loader import MicroBatchLoader
from armature.components.vlm.memory import chosen_recomputation, memory_of_rank
from armature.components.vlm.worker import Loader

NOT_COMPARED = {"save_every", "keep_checkpoints"}
"""Trainer settings that may change when a run resumes, because rollouts do not depend on them. With a constant learning
rate these include max_steps."""


@dataclass(frozen=True)
class _Opened:
    """Parts that `MultimodalGRPOTrainer` makes from its model when the model is first needed."""

    tokenizer: Any
    weights: Path
    adapter: MultimodalAdapter
    samples: FamilyAdapter | UserAdapter
    forbidden: tuple[int, ...]
    trainer: TrainerClient


class MultimodalGRPOTrainer:
    """Trains a vision-language model by reinforcement learning in this process.

    It runs the same loop as the flow `train-vlm`. Trainer and server must agree on log-probs before the first step.
    Rollouts and batches are stored in `config.folder`, so a run that was stopped resumes from its newest checkpoint
    with the rollouts and batches since then. With evaluations it plays held-out tasks between steps.

    The tasks come from `train_dataset`, or from an environment (`set_environment`). Rows have a column `prompt`, a text
    or a list of messages, and may have images in `image` or `images`. The column `answer`, `solution` or `label` holds
    the right answer. All columns except images are passed to the rewards.

    Dropout is turned off, whatever the model's configuration says, and trained weights are kept in fp32. One GPU
    trains in this process, or without a GPU the CPU. A model by name is trained by one process for each of
    `config.processes` GPUs. The constructor loads, writes and prints nothing.

    Args:
        model: a transformers model, with or without PEFT adapters, a folder to load one from, or a name on the hub.
        tokenizer: the model's processor or tokenizer; by default the processor in the model's folder.
        adapter: turns rollouts into batches; by default the adapter of the model's family, which needs a processor.
        config: all other options. With a dataset `max_steps` is by default one pass over its rows, and with held-out
            rows `eval_steps` is by default `max_steps`: one evaluation before the first step and one after the last.
        reward_funcs: a function, the name of a reward (`exact_match`, or MODULE:FUNCTION), or a list of both. The
            reward of a completion is their weighted sum. `CallableReward` describes functions.
        reward_weights: factors of the rewards; by default 1 for each.
        train_dataset: rows to train on; `write_rows` lists what they may be. A dict has several datasets by name, each
            with metrics of its own.
        eval_dataset: rows to evaluate with.
        eval_fraction: share of the rows in `train_dataset` to evaluate with and not to train on, in place of
            `eval_dataset`.
        prompt: template of the prompt for rows without one: "How many? {question}" has the value of a column.
        dataset_weights: shares of several datasets in the training tasks, by name; by default 1 for each.
        server: "auto" starts vLLM servers and ends them with the training: a single GPU is shared with the trainer, of
            several the last half serves. A URL joins a running server. By default "auto" with a
            `train_dataset`, and otherwise the server that `config` names.
        callbacks: objects or classes with methods of transformers' `TrainerCallback`: `on_train_begin`, `on_step_end`,
            `on_log`, `on_evaluate`, `on_save`, `on_train_end`. `control.should_training_stop` ends the training after
            the step.
        report_to: trackers that receive metrics, options and rollouts: `tensorboard`, `trackio`, `wandb`.
        tools: typed functions that the model can call, or their names (`zoom`, or MODULE:FUNCTION); see `ToolBox`.
        max_tool_calls: number of calls in an episode.

    Raises:
        ConfigurationError: `config` and `train_dataset` are missing, rewards and data do not fit, or an argument is
            unknown or has another type.
        DataError: a folder or file does not exist, or rows in memory cannot be used.

    Example:
        result = MultimodalGRPOTrainer(model, reward_funcs="exact_match", train_dataset=rows, eval_fraction=0.1).train()
    """

    def __init__(
        self,
        model: nn.Module | str | Path,
        tokenizer: Any = None,
        adapter: MultimodalAdapter | None = None,
        config: MultimodalRLConfig | None = None,
        *,
        reward_funcs: Any = (),
        reward_weights: Sequence[float] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        eval_fraction: float = 0.0,
        prompt: str = "",
        dataset_weights: Mapping[str, float] | None = None,
        server: str | None = None,
        callbacks: Any = (),
        report_to: str | Sequence[str] | None = (),
        tools: Sequence[Any] = (),
        max_tool_calls: int = 4,
        **unknown: Any,
    ) -> None:
        refuse_unknown_arguments(unknown)
        check_model(model, tokenizer, adapter)
        self._data = program_data(
            train_dataset, eval_dataset, eval_fraction, reward_funcs, reward_weights, prompt, dataset_weights
        )
        if self._data is not None:
            config = config or MultimodalRLConfig()
        if not isinstance(config, MultimodalRLConfig):
            raise ConfigurationError(
                f"MultimodalGRPOTrainer needs a MultimodalRLConfig as config, not {type(config).__name__}",
                code="config_missing",
                remedy="pass config=MultimodalRLConfig(...)",
            )
        if self._data and config.env_id:
            raise tasks_twice("config.env_id")
        if config.packing and not isinstance(adapter, FamilyAdapter | None):
            raise ConfigurationError(
                f"{type(adapter).__name__} builds complete batches, whose rows cannot be packed",
                code="batches_not_packable",
                where="MultimodalRLConfig.packing",
                remedy="omit packing, or omit the adapter if the model's family has one",
            )
        self.config, self.machine, self.served = config, config.machine, JOINED
        self._server = server or ("auto" if self._data else "")
        if self._server not in ("", "auto"):
            self.machine = joining(self.machine, self._server)
        if (config.processes or 1) > 1:
            refuse_on_ranks(model, adapter)
        if config.lora is not None and not isinstance(model, str | Path):
            raise ConfigurationError(
                f"lora is for a model by name, but model is {type(model).__name__}, an object",
                code="lora_of_object",
                where="MultimodalRLConfig.lora",
                remedy="give it adapters with peft.get_peft_model, or pass a folder or a name on the hub",
            )
        self._arguments = model, tokenizer, adapter
        self._callbacks = made_callbacks(callbacks)
        self._tool_names = [each for each in tools if isinstance(each, str)]
        self._tools = None
        if tools:
            functions = [each for each in tools if not isinstance(each, str)]
            self._tools = ToolBox(self._tool_names, functions, max_calls=max_tool_calls)
        report_to = () if report_to in (None, "none") else report_to
        self._report_to = list(map(str, report_to)) if isinstance(report_to, list | tuple) else [str(report_to)]
        refuse_missing_trackers(self._report_to, "report_to")
        if config.env_id:
            self._environment_settings(config.env_id, config.env_args)
        if self._data is not None:
            self._data.refuse_ahead(self._most_tasks, config.primary_reward_key)
        check_source(model)
        self.store = ArtifactStore(config.folder / "store")
        self.images = ImageStore(self.store.images)
        self.environment: Environment | None = None
        self._examined: Environment | None = None
        self._digests: dict[str, str] = {}
        self._key = ""

    @cached_property
    def _opened(self) -> _Opened:
        """The parts that are made from the model when they are first used.

        They include the learner, which needs the number of steps.
        """
        _ = self._rows
        config, (model, tokenizer, adapter) = self.config, self._arguments
        by_name = isinstance(model, str | Path) and adapter is None
        processes = config.processes or (default_processes() if self._server == "auto" and by_name else 1)
        self.machine = with_ranks(self.machine, processes)
        weights = locate(self._source.source, self._source.revision)
        if self._server == "auto":
            most_images = self._rows.most_images if self._rows else 0
            most_videos = getattr(self.environment, "most_videos", 0)
            self.machine, self.served = serving(self.machine, weights, most_images, config.bf16, most_videos)
        torch.manual_seed(config.seed)
        network, tokenizer = self._loaded(model, tokenizer, processes)
        tqdm.write("Initializing MultimodalGRPOTrainer")
        adapter = adapter or get_adapter(weights, tokenizer, self.images.open)
        if isinstance(adapter, FamilyAdapter):
            adapter.images = adapter.images or self.images.open
            forbidden = tuple(sorted(adapter.collator.forbidden_token_ids))
            samples: FamilyAdapter | UserAdapter = adapter
            load: Loader = MicroBatchLoader(adapter.collator, self.images, workers=0)
        else:
            forbidden = placeholder_token_ids(weights)
            samples = load = UserAdapter(adapter, config.micro_batch_size, self._rollouts)
        policy = TrainerPolicySettings(
            model_path=weights,
            model=self._model_settings(weights),
            trainer=config.settings().trainer,
            temperature=config.temperature,
            images=self.images.root,
        )
        if network is None:
            trainer = TrainerClient(policy, self.machine, config.folder)
        else:
            trainer = InProcessTrainer(
                network,
                tokenizer,
                policy,
                forbidden_token_ids=forbidden,
                load=load,
                machine=self.machine,
                folder=config.folder,
            )
        return _Opened(tokenizer, weights, adapter, samples, forbidden, trainer)

    @cached_property
    def _source(self) -> ModelSettings:
        """The source of the initial weights: a folder, or a name on the hub with its newest commit."""
        model, tokenizer, _ = self._arguments
        if not isinstance(model, str | Path):
            return self._model_settings(save_checkpoint(model, tokenizer, self.config.folder / "model"))
        if is_folder(model):
            return self._model_settings(locate(model))
        check_source_name(str(model), "main")
        commit = commit_of(str(model), "main", "model", tqdm.write)
        return self._model_settings(model).model_copy(update={"revision": commit})

    def _loaded(self, model: nn.Module | str | Path, tokenizer: Any, processes: int) -> tuple[Any, Any]:
        """Return the model and its processor or tokenizer, which are loaded unless they are objects.

        The model is None if several ranks load it themselves.
        """
        if not isinstance(model, str | Path):
            network: Any = model
            recompute_activations(network, self.config.gradient_checkpointing)
            return network, tokenizer
        tqdm.write(f"Loading VLM: {model}")
        settings = self._source
        processor = tokenizer or load_processor(settings.source, settings)
        if processes > 1:
            return None, processor
        ranks = TrainerProcesses.of(self.machine)
        room = memory_of_rank(ranks, next(iter(ranks.gpus), None))
        weights = locate(settings.source, settings.revision)
        settings = chosen_recomputation(weights, settings, self.config.settings().trainer, ranks, room)
        return load_model(settings.source, settings), processor

    def _model_settings(self, source: str | Path) -> ModelSettings:
        options = self.config.model_dump(include={"gradient_checkpointing", "lora"})
        return ModelSettings(source=str(source), dtype="bfloat16" if self.config.bf16 else "float32", **options)

    @property
    def model(self) -> Any:
        """The model that is trained; None if several ranks train it."""
        trainer = self._opened.trainer
        return trainer.learner.model if isinstance(trainer, InProcessTrainer) else None

    @property
    def adapter(self) -> MultimodalAdapter:
        """The adapter that turns rollouts into batches."""
        return self._opened.adapter

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Ids of the tokens that stand for images, which trainer and server leave out of their softmax."""
        return self._opened.forbidden

    def set_environment(self, environment: str | Environment, **args: Any) -> None:
        """Set the environment to train on.

        Args:
            environment: the name of a registered environment, or an instance. An instance is also used for evaluations;
                for a name, evaluations get an instance of their own.
            args: settings of a registered environment.

        Raises:
            ConfigurationError: the tasks come from `train_dataset`.
        """
        if self._data:
            raise tasks_twice("set_environment")
        if not isinstance(environment, str):
            self.environment, self._examined, kind = environment, environment, type(environment)
            self._played: Any = f"{kind.__module__}.{kind.__qualname__}"
            return
        tqdm.write(f"Loading environment: {environment}")
        settings = self._environment_settings(environment, args)
        self.environment, self._examined = make_environment(settings), make_environment(settings.for_evaluation())
        self._played = settings.model_dump(mode="json") | environment_sources(settings)

    def _environment_settings(self, name: str, args: Mapping[str, Any]) -> EnvironmentSettings:
        """Return the settings of a registered environment.

        Raises:
            ConfigurationError: there is no such environment, or it has other settings.
        """
        with explained(EnvironmentSettings, f"environment {name!r}"):
            return EnvironmentSettings(
                name=name,
                args=dict(args),
                train_tasks=self.config.env_tasks,
                heldout_tasks=self.config.eval_tasks if self.config.eval_steps else 1,
                seed=self.config.seed,
            )

    def train(self) -> TrainingResult:
        """Train until step `max_steps`, from the newest checkpoint if there is one, and return the last step's metrics.

        Raises:
            ConfigurationError: no environment is set, rows and rewards do not fit, or the training in the folder
                has others.
            DataError: rows cannot be used.
            MismatchError: trainer and server do not agree on log-probs.
            ServerError: the server does not answer, or does not accept new weights.
        """
        self._set_tasks()
        config, settings, opened = self.config, self.config.settings(), self._opened
        assert self.environment is not None
        assert self._examined is not None
        changeable = NOT_COMPARED | {"max_steps"} if settings.trainer.lr_scheduler == "constant" else NOT_COMPARED
        made_from = settings.model_dump(mode="json", exclude={"preflight": True, "trainer": changeable})
        played = [made_from, self._played, config.primary_reward_key]
        if self._tools is not None:
            played += [self._tools.max_calls, self._tools.schemas, tool_sources(self._tool_names)]
            self.environment = with_tools(self.environment, self._tools)
            self._examined = with_tools(self._examined, self._tools)
        if (heldout := config.heldout_set()) is not None:
            played.append(heldout.model_dump(mode="json", exclude={"patience"}))
        self._key = document_digest(played)[:20]
        if self._data is not None:
            refuse_other_data(config.folder, document_digest(self._played))
        with (
            closing(self.environment) as environment,
            closing(self._examined) as examined,
            closing(TrainerEvents(config, self._callbacks)) as events,
            with_trackers(events, self._report_to, self._tracker_run()) as tracked,
        ):
            parts = RunParts(
                environment=environment,
                tasks=list(environment.tasks("train")),
                adapter=opened.samples,
                tokenizer=getattr(opened.tokenizer, "tokenizer", opened.tokenizer),
                vocabulary=vocabulary(opened.weights),
                servers=self._pool(opened.weights),
                trainer=opened.trainer,
                digests=self._digests,
                sync_every=config.sync_to_vllm_every,
                rewarded=self._rewarded,
                heldout=self._heldout_set(examined),
            )
            context = StageContext(self.machine, tracked, ThreadUnits(), config.folder, self.store.images, self._key)
            with (
                self.store.lock("train", self._key),
                open_parts(settings, context, self.store, parts) as (run, done),
            ):
                tqdm.write("Server is up!\nStarting training...")
                events.begin(done)
                run.stopped = events.stopped
                run.finish(self.final, last := run.train_from(done))
                best = run.evaluations.summary() if run.evaluations is not None else {}
                # The file may also have later steps, of a training in this folder that was to make more.
                history = [row for row in run.history.read() if row["step"] <= last]
                result = TrainingResult(self.final, best, history)
                events.end(result)
                return result

    @property
    def final(self) -> Path:
        """The folder of the trained model."""
        return self.config.folder / "final"

    def save_model(self, folder: str | Path) -> Path:
        """Copy the trained model to `folder`, which `from_pretrained` of transformers loads, and return its path.

        Raises:
            ConfigurationError: there is no trained model yet.
        """
        if not self.final.is_dir():
            raise ConfigurationError(
                "there is no trained model yet", code="not_trained", where=str(self.final), remedy="call train first"
            )
        return Path(shutil.copytree(self.final, folder, dirs_exist_ok=True))

    def push_to_hub(self, repo_id: str, public: bool = False) -> str:
        """Upload the trained model to a repository of the hub, made if it is missing, and return the commit's address.

        Raises:
            ConfigurationError: there is no trained model yet.
            huggingface_hub.errors.HfHubHTTPError: there is no token with the right to write, or the hub refuses.
        """
        with TemporaryDirectory() as folder:
            self.save_model(folder)
            api = HfApi()
            api.create_repo(repo_id, private=not public, exist_ok=True)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder).commit_url)

    def _set_tasks(self) -> None:
        """Set the environment from the dataset or the config, if `set_environment` was not called.

        Raises:
            ConfigurationError: no environment is named.
        """
        config = self.config
        if (rows := self._rows) is not None:
            config = self.config
            count = config.eval_tasks, max(1, available_cpus() // 2)
            self.environment = rows.environment(config.seed, *count)
            self._examined = rows.environment(config.seed, *count)
            self._digests = rows.sources
            self._played = rows.played | self._digests
            return
        if self.environment is None:
            if not config.env_id:
                raise ConfigurationError(
                    "no environment is set", code="environment_missing", remedy="call set_environment, or set env_id"
                )
            self.set_environment(config.env_id, **config.env_args)

    @property
    def _most_tasks(self) -> int | None:
        """Largest number of tasks that the training plays; None if it plays each row once."""
        config = self.config
        groups = config.rollouts_per_step // config.group_size
        return config.max_steps * groups if "max_steps" in config.model_fields_set else None

    @cached_property
    def _rows(self) -> WrittenData | WrittenParts | None:
        """The dataset's rows, written to the run's folder. Their number determines defaults of `config`."""
        if (data := self._data) is None:
            return None
        config, by_user = self.config, self.config.model_fields_set
        groups = config.rollouts_per_step // config.group_size
        rows = data.write(config.folder / "data", self._most_tasks)
        _ = rows.callables  # so that wrong rewards are refused before anything is fetched
        rows = rows.reserving(reserved_tokens(self._source, images_only=False))
        steps = config.max_steps if "max_steps" in by_user else max(1, ceil(rows.pass_length / groups))
        update = {"max_steps": steps}
        if data.has_heldout_rows and "eval_steps" not in by_user:
            update["eval_steps"] = steps
        self.config = config.model_copy(update=update)
        return rows

    def _pool(self, weights: Path) -> ServerPool:
        logs = self.config.folder / "logs"
        return ServerPool(weights, self.served, self.machine, logs, forbidden_token_ids=self._opened.forbidden)

    def _tracker_run(self) -> TrackerRun:
        config = self.config
        return TrackerRun(
            project="armature",
            name=config.folder.name,
            fingerprint=self._key,
            settings=config.model_dump(mode="json"),
            folder=config.folder / "trackers",
            workspace=config.folder,
            images=self.store.images,
        )

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
                remedy='pass eval_dataset or eval_fraction, return some from tasks("heldout"), or omit eval_steps',
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
            raise unknown_reward_part(key, trajectory.reward_parts)
        turns = tuple(replace(turn, reward=turn.reward_parts.get(key, 0.0)) for turn in trajectory.turns)
        return replace(trajectory, turns=turns)
