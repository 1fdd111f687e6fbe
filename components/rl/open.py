"""Opening a run: starts its servers, its trainer and its environments, and checks memory and agreement before."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
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
from armature.components.contracts.errors import ArmatureError, ConfigurationError
from armature.components.contracts.stages import Artifact, ResultT, StageContext, report_waiting
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.stage import load_tasks
from armature.components.evaluation.settings import HeldoutSetSettings
from armature.components.families.family import COMPONENTS, family_of
from armature.components.inference.command import ServedAdapters, vocabulary
from armature.components.inference.pool import ServerPool
from armature.components.models.adapters import get_adapter, get_collator
from armature.components.models.gguf import model_source
from armature.components.models.load import load_config, load_model, load_processor, save_checkpoint
from armature.components.models.settings import ModelSettings
from armature.components.models.source import locate
from armature.components.rl.evaluations import BEST, HeldoutSet
from armature.components.rl.run import RLRun, RunParts
from armature.components.rl.settings import LoopSettings, TrainVLMSettings, teacher_input
from armature.components.rl.teacher import refuse_other_tokens, teachers_of
from armature.components.rollouts.shards import RolloutWorkers
from armature.components.training.processes import TrainerProcesses
from armature.components.vlm.client import TrainerClient, TrainerPolicySettings
from armature.components.vlm.memory import BYTES, GIB, chosen_recomputation, estimate_memory, memory_of_rank
from armature.components.vlm.settings import TeacherSettings

QUANTIZED_BASE = "quantized-base"
"""Name of the workspace's folder with the initial weights after rounding to 4 bits."""
SKIPPED_BATCHES = "skipped-batches.json"
"""Name of the workspace's file with the steps whose batches are skipped."""


@contextmanager
def open_run(
    settings: TrainVLMSettings,
    inputs: Mapping[str, Artifact],
    context: StageContext,
    store: ArtifactStore,
    load_on_join: bool = True,
) -> Iterator[tuple[RLRun, int]]:
    """Start the servers and the trainer of a run. Yield the run, and the last step that the trainer has saved.

    Args:
        load_on_join: give the run's weights to joined servers, which somebody else started.
    """
    weights = base_weights(locate(inputs["model"].path, settings.model.revision), settings.model, context.workspace)
    teacher = settings.teacher
    teacher_paths = located_teachers(teacher, inputs)
    policy = TrainerPolicySettings(
        model_path=weights,
        model=settings.model,
        trainer=settings.trainer,
        temperature=settings.rollouts.sampling.temperature,
        images=context.images,
        teacher=teacher,
        teacher_paths=teacher_paths,
    )
    adapter = get_adapter(
        weights,
        load_processor(weights, settings.model),
        ImageStore(context.images).open,
        settings.batches.max_sequence_tokens,
    )
    tasks = load_tasks(inputs["tasks"].path, "train")
    for kind, path in teacher_paths.items():
        assert teacher is not None
        refuse_other_tokens(adapter.collator, get_collator(path, load_processor(path, teacher.models[kind].model)))
        context.events.message(f"teacher {kind or 'of all tasks'}: {path}; same tokenizer and image processor")
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
            tasks=tasks,
            teachers=teachers_of(tasks, teacher) if teacher is not None else {},
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
            if context.machine.workers.rollouts
            else None,
            adapters=servers.adapters is not None,
        )
        yield opened.enter_context(open_parts(settings.loop, context, store, parts))


def located_teachers(teacher: TeacherSettings | None, inputs: Mapping[str, Artifact]) -> dict[str, Path]:
    """Return the folders of the weights of all teachers, by the kind of task that they score."""
    return {
        kind: locate(inputs[teacher_input(kind)].path)
        if model.recipe
        else locate(model_source(model.source), model.revision)
        for kind, model in (teacher.models.items() if teacher is not None else ())
    }


def base_weights(weights: Path, model: ModelSettings, workspace: Path) -> Path:
    """Return the folder of the weights from which trainer and servers start.

    For a model in 4 bits, the folder has the rounded weights in full precision, so that servers compute with the same
    numbers. It is written once. The trainer quantizes them again, which changes nothing.
    """
    if model.quantization is None:
        return weights
    folder = workspace / QUANTIZED_BASE
    if not folder.exists():
        plain = model.model_copy(update={"lora": None, "gradient_checkpointing": False})
        save_checkpoint(load_model(weights, plain), load_processor(weights, model), folder)
    return folder


def served_adapters(model: ModelSettings, weights: Path) -> ServedAdapters | None:
    """Return the adapters that servers hold beside the initial weights; None if servers get complete weights.

    Raises:
        ConfigurationError: vLLM cannot serve adapters of these parts of the model.
    """
    lora = model.lora
    if lora is None or lora.served_as == "merged":
        return None
    adapted = set(COMPONENTS if lora.scope == "all" else ("language",)) - set(model.freeze)
    family = family_of(load_config(weights, model))
    if missing := sorted(adapted - set(family.served_adapters)):
        raise ConfigurationError(
            f"vLLM does not serve adapters of {', '.join(missing)} of {family.name}",
            code="adapters_not_served",
            where=f'model.lora.served_as = "adapter", scope = "{lora.scope}"',
            remedy='set served_as = "merged"' + ', or scope = "language"' * ("language" not in missing),
        )
    return ServedAdapters(lora.rank, vision=adapted != {"language"})


def _environment(settings: EnvironmentSettings, context: StageContext) -> Environment:
    return make_environment(settings, context.machine.workers.environments)


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
    """Start the servers and the trainer of `parts`; yield the run and the last step that the trainer has saved."""
    with ThreadPoolExecutor(1) as starter, start_blocking_portal(name="servers") as portal:
        context.events.message("starting the trainer and the servers")
        resumed = starter.submit(_start, parts)

        def missing() -> str:
            return ", ".join(["the trainer"] * (not resumed.done()) + parts.servers.starting())

        try:
            with ExitStack() as opened:
                with report_waiting(context.events, missing):
                    if parts.trainer.settings.processes.server_share is not None:
                        # vLLM measures the free memory of its GPU at the start, so the trainer on that GPU loads its
                        # weights before.
                        resumed.result()
                    opened.enter_context(portal.wrap_async_context_manager(parts.servers))
                    done = resumed.result()
                run = RLRun(settings, context, store, parts, portal)
                named, last = context.machine.skip_batches, settings.trainer.max_steps
                run.skipped = skipped_batches(context.workspace, named, done, last)
                run.resume(done)
                yield run, done
        finally:
            # A trainer that did not start has raised its error above already, or another error is being raised.
            with suppress(ArmatureError):
                resumed.result()
            parts.trainer.stop()


def _start(parts: RunParts) -> int:
    parts.trainer.start()
    return parts.trainer.resume()


def skipped_batches(workspace: Path, named: Collection[int], done: int, last: int) -> frozenset[int]:
    """Return the steps whose batches are skipped: `named`, and the steps named in earlier starts of the run.

    Args:
        done: the last step that the trainer has saved.
        last: the last step of the run.

    Raises:
        ConfigurationError: a newly named step is applied already, or the run does not have it.
    """
    file = workspace / SKIPPED_BATCHES
    before: set[int] = set(json.loads(file.read_text())) if file.exists() else set()
    new = set(named) - before
    if wrong := sorted(step for step in new if step <= done or step > last):
        raise ConfigurationError(
            f"the batches of steps {', '.join(map(str, wrong))} cannot be skipped: {done} of {last} steps are applied",
            code="steps_not_skippable",
            where="machine.skip_batches",
            remedy="name steps that are not applied yet, or delete the checkpoints from these steps on",
        )
    if new:
        file.write_text(json.dumps(sorted(before | new)))
    return frozenset(before | new)


def check(
    settings: TrainVLMSettings,
    inputs: Mapping[str, Artifact],
    context: StageContext,
    then: Callable[[RLRun], ResultT],
) -> ResultT:
    """Report the memory that the run needs and how well trainer and servers agree, without training.

    Joined servers keep their weights.

    Args:
        then: a function that is called with the open run after that. Its result is returned.

    Raises:
        MismatchError: trainer and servers do not agree, so training would unknowingly be off-policy.
    """
    weights = locate(inputs["model"].path, settings.model.revision)
    processes = TrainerProcesses.of(context.machine)
    # On a cluster the trainer's node is not chosen yet, so its memory is unknown.
    elsewhere = context.machine.trainer_bundle is not None
    available, where = (None, "") if elsewhere else available_memory(processes)
    room = 0 if elsewhere else memory_of_rank(processes, processes.gpus[0] if processes.gpus else None)
    model = chosen_recomputation(weights, settings.model, settings.trainer, processes, room)
    estimate = estimate_memory(weights, model, settings.trainer, settings.inference.dtype)
    memory = estimate.over(processes.shards, processes.context_parallel)
    for line in memory.lines(available, where):
        context.events.message(line)
    for kind, source in located_teachers(settings.teacher, inputs).items():
        assert settings.teacher is not None
        teacher = settings.teacher.models[kind]
        scoring = estimate_memory(source, teacher.model, settings.trainer, settings.inference.dtype)
        size = scoring.parameters * (4 if processes.shards > 1 else BYTES[teacher.dtype]) / processes.shards
        context.events.message(f"teacher weights        {size / GIB:.2f} GiB on each rank, beside the trainer's")
    if settings.model.gradient_checkpointing == "auto":
        recomputed = float(model.gradient_checkpointing)
        choice = f"recomputes activations of {recomputed:.0%} of the layers" if recomputed else "keeps activations"
        context.events.message(
            "gradient checkpointing  auto: each rank keeps activations if they fit on its node"
            if elsewhere
            else f"gradient checkpointing  auto: the backward pass {choice} on this machine"
        )
    if available is not None and (share := processes.server_share) is not None:
        context.events.message(memory.beside_server(share, torch.cuda.mem_get_info(processes.gpus[0])[1], available))
    with open_run(settings, inputs, context, open_store(context.machine), load_on_join=False) as (run, _):
        for line in run.preflight().lines():
            context.events.message(line)
        result = then(run)
    context.events.message("trainer and server agree: ready to train")
    return result


def available_memory(processes: TrainerProcesses) -> tuple[int, str]:
    """Return the number of bytes that are free for a rank, and a name for the GPU or machine.

    On GPUs they are the free bytes of the trainer's first GPU. On a CPU they are each rank's part of the main memory
    that is free.
    """
    if processes.gpus:
        return torch.cuda.mem_get_info(processes.gpus[0])[0], f"GPU {processes.gpus[0]}"
    where = "this machine" + (f" for each of {processes.processes} ranks" if processes.processes > 1 else "")
    return psutil.virtual_memory().available // processes.processes, where
