"""A run with its servers and its trainer up."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path

import psutil
import torch
from anyio.from_thread import start_blocking_portal

from armature.components.artifacts.images import ImageStore
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import open_store
from armature.components.contracts.episodes import Environment
from armature.components.contracts.errors import ConfigurationError, TrainerError
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.settings import HeldoutSetSettings
from armature.components.families.family import COMPONENTS, family_of
from armature.components.inference.command import ServedAdapters, vocabulary
from armature.components.inference.pool import ServerPool
from armature.components.models.adapters import get_adapter
from armature.components.models.load import load_config, load_model, load_processor, save_checkpoint
from armature.components.models.settings import ModelSettings
from armature.components.models.source import locate
from armature.components.rl.evaluations import BEST, HeldoutSet
from armature.components.rl.run import RLRun, RunParts
from armature.components.rl.settings import LoopSettings, TrainVLMSettings
from armature.components.rollouts.shards import RolloutWorkers
from armature.components.training.processes import TrainerProcesses
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from armature.components.vlm.memory import chosen_recomputation, estimate_memory, memory_of_rank

QUANTIZED_BASE = "quantized-base"
SKIPPED_BATCHES = "skipped-batches.json"


@contextmanager
def open_run(
    settings: TrainVLMSettings,
    inputs: Mapping[str, Artifact],
    context: StageContext,
    store: ArtifactStore,
    load_on_join: bool = True,
) -> Iterator[tuple[RLRun, int]]:
    """The run with its servers and its trainer up, and the last step that the trainer has saved.

    Servers that somebody else started are given the run's weights, unless `load_on_join` is False.
    """
    weights = base_weights(locate(inputs["model"].path, settings.model.revision), settings.model, context.workspace)
    policy = TrainerPolicySettings(
        model_path=weights,
        model=settings.model,
        trainer=settings.trainer,
        temperature=settings.rollouts.sampling.temperature,
        images=context.images,
    )
    adapter = get_adapter(
        weights,
        load_processor(weights, settings.model),
        ImageStore(context.images).open,
        settings.batches.max_sequence_tokens,
    )
    servers = ServerPool(
        weights,
        settings.inference,
        context.machine,
        log_folder=context.workspace / "logs",
        forbidden_token_ids=sorted(adapter.collator.forbidden_token_ids),
        load_on_join=load_on_join,
        adapters=served_adapters(settings.model, weights),
        in_flight_updates=settings.rollouts.in_flight_updates,
    )
    saved = partial(context.saved, best=context.workspace / BEST)
    with ExitStack() as opened:
        environment = opened.enter_context(closing(_environment(settings.environment, context)))
        parts = RunParts(
            environment=environment,
            tasks=load_tasks(inputs["tasks"].path, "train"),
            adapter=adapter,
            tokenizer=adapter.tokenizer,
            vocabulary=vocabulary(weights),
            servers=servers,
            trainer=TrainerClient(policy, context.machine, context.workspace / "trainer", saved),
            digests={"tasks": inputs["tasks"].digest},
            heldout=_heldout_set(settings.evaluation, settings.environment, inputs["tasks"], context, opened)
            if settings.evaluation is not None
            else None,
            workers=opened.enter_context(closing(_workers(settings, context, store, servers)))
            if context.machine.rollout_workers
            else None,
            adapters=servers.adapters is not None,
        )
        yield opened.enter_context(open_parts(settings.loop, context, store, parts))


def base_weights(weights: Path, model: ModelSettings, workspace: Path) -> Path:
    """The folder that trainer and servers start from: `weights`, or what is left of them in 4 bits, written once.

    The trainer quantizes it again, which changes nothing.
    """
    if model.quantization is None:
        return weights
    folder = workspace / QUANTIZED_BASE
    if not folder.exists():
        plain = model.model_copy(update={"lora": None, "gradient_checkpointing": False})
        save_checkpoint(load_model(weights, plain), load_processor(weights, model), folder)
    return folder


def served_adapters(model: ModelSettings, weights: Path) -> ServedAdapters | None:
    """What servers hold beside the weights; None where they get whole weights.

    Raises:
        ConfigurationError: vLLM does not serve them.
    """
    lora = model.lora
    if lora is None or lora.served_as == "merged":
        return None
    adapted = set(COMPONENTS if lora.scope == "all" else ("language",)) - set(model.freeze)
    family = family_of(load_config(weights, model))
    if missing := sorted(adapted - set(family.served_adapters)):
        raise ConfigurationError(
            f"vLLM serves no adapters of {', '.join(missing)} of {family.name}",
            code="adapters_not_served",
            where=f'model.lora.served_as = "adapter", scope = "{lora.scope}"',
            remedy='set served_as = "merged"' + ', or scope = "language"' * ("language" not in missing),
        )
    return ServedAdapters(lora.rank, vision=adapted != {"language"})


def _environment(settings: EnvironmentSettings, context: StageContext) -> Environment:
    return make_environment(settings, context.machine.environment_processes)


def _workers(
    settings: TrainVLMSettings, context: StageContext, store: ArtifactStore, servers: ServerPool
) -> RolloutWorkers:
    plan, machine, run = settings.rollouts, context.machine, context.fingerprint
    return RolloutWorkers(plan, settings.environment, servers, store, machine, run)


def _heldout_set(
    plan: HeldoutSetSettings,
    environment: EnvironmentSettings,
    tasks: Artifact,
    context: StageContext,
    opened: ExitStack,
) -> HeldoutSet:
    played = opened.enter_context(closing(_environment(environment.for_evaluation(), context)))
    listed = load_tasks(tasks.path, "heldout")[: plan.heldout_tasks]
    return HeldoutSet(plan, listed, played, {"tasks": tasks.digest})


@contextmanager
def open_parts(
    settings: LoopSettings, context: StageContext, store: ArtifactStore, parts: RunParts
) -> Iterator[tuple[RLRun, int]]:
    """The run of `parts`, of which servers and trainer are up within it, and the last step that the trainer saved."""
    with ThreadPoolExecutor(1) as starter, start_blocking_portal(name="servers") as portal:
        context.events.message("starting the trainer and the servers")
        resumed = starter.submit(_start, parts)
        try:
            with portal.wrap_async_context_manager(parts.servers):
                done = resumed.result()
                run = RLRun(settings, context, store, parts, portal)
                named, last = context.machine.skip_batches, settings.trainer.max_steps
                run.skipped = skipped_batches(context.workspace, named, done, last)
                run.resume(done)
                yield run, done
        finally:
            with suppress(TrainerError):  # one that did not start has said so, or something worse has
                resumed.result()
            parts.trainer.stop()


def _start(parts: RunParts) -> int:
    parts.trainer.start()
    return parts.trainer.resume()


def skipped_batches(workspace: Path, named: Collection[int], done: int, last: int) -> frozenset[int]:
    """The steps to make without an update: those named now, and those named when the run was started before.

    Raises:
        ConfigurationError: a step that the weights contain already, or that the run does not have.
    """
    file = workspace / SKIPPED_BATCHES
    before: set[int] = set(json.loads(file.read_text())) if file.exists() else set()
    new = set(named) - before
    if wrong := sorted(step for step in new if step <= done or step > last):
        raise ConfigurationError(
            f"the batches of steps {', '.join(map(str, wrong))} cannot be skipped: {done} of {last} steps are made",
            code="steps_not_skippable",
            where="machine.skip_batches",
            remedy="name steps that are still to come, or delete the checkpoints after the step before",
        )
    if new:
        file.write_text(json.dumps(sorted(before | new)))
    return frozenset(before | new)


# Know before a run whether the machine and the model fit: memory, then log-probs of both sides.


def check(settings: TrainVLMSettings, inputs: Mapping[str, Artifact], context: StageContext) -> None:
    """Say what the run needs of memory and how well trainer and server agree. Joined servers stay as they are.

    Raises:
        MismatchError: they do not agree; training would be off-policy without knowing it.
    """
    weights = locate(inputs["model"].path, settings.model.revision)
    processes = TrainerProcesses.of(context.machine)
    elsewhere = context.machine.trainer_bundle is not None  # where the least is said that ranks need
    available, where = (None, "") if elsewhere else available_memory(processes)
    room = 0 if elsewhere else memory_of_rank(processes, processes.gpus[0] if processes.gpus else None)
    model = chosen_recomputation(weights, settings.model, settings.trainer, processes, room)
    estimate = estimate_memory(weights, model, settings.trainer, settings.inference.dtype)
    memory = estimate.over(processes.shards, processes.context_parallel)
    for line in memory.lines(available, where):
        context.events.message(line)
    if settings.model.gradient_checkpointing == "auto":
        kept = "recomputes" if model.gradient_checkpointing else "keeps"
        context.events.message(
            "gradient checkpointing  auto: on its node each rank keeps activations if they fit"
            if elsewhere
            else f"gradient checkpointing  auto: the backward pass {kept} activations here"
        )
    if available is not None and (share := processes.server_share) is not None:
        context.events.message(memory.beside_server(share, torch.cuda.mem_get_info(processes.gpus[0])[1], available))
    with open_run(settings, inputs, context, open_store(context.machine), load_on_join=False) as (run, _):
        for line in run.preflight().lines():
            context.events.message(line)
    context.events.message("trainer and server agree: ready to train")


def available_memory(processes: TrainerProcesses) -> tuple[int, str]:
    """Free bytes on the trainer's first GPU, or of main memory the part of each rank here."""
    if processes.gpus:
        return torch.cuda.mem_get_info(processes.gpus[0])[0], f"GPU {processes.gpus[0]}"
    where = "this machine" + (f" for each of {processes.processes} ranks" if processes.processes > 1 else "")
    return psutil.virtual_memory().available // processes.processes, where
