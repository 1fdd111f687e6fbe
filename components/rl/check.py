"""Know before a run whether the machine and the model fit: memory, then log-probs of both sides."""

from __future__ import annotations

from collections.abc import Mapping

import psutil
import torch

from armature.components.contracts.stages import Artifact, StageContext
from armature.components.models.source import locate
from armature.components.rl.open import open_run
from armature.components.rl.settings import TrainVLMSettings
from armature.components.stages import open_store
from armature.components.training.processes import TrainerProcesses
from armature.components.vlm.memory import chosen_recomputation, estimate_memory, memory_of_rank


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
