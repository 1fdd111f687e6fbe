"""Know before a run whether the machine and the model fit: memory, then log-probs of both sides."""

from __future__ import annotations

from collections.abc import Mapping

from components.contracts.stages import Artifact, StageContext
from components.models.source import locate
from components.rl.memory import available_memory, estimate_memory
from components.rl.open import open_run
from components.rl.settings import TrainVLMSettings
from components.stages import open_store


def memory_lines(settings: TrainVLMSettings, model: Artifact, context: StageContext) -> list[str]:
    """What the trainer and a server need, and what is free."""
    weights = locate(model.path, settings.model.revision)
    estimate = estimate_memory(weights, settings.model, settings.trainer, settings.inference.dtype)
    return estimate.lines(*available_memory(context.machine.trainer_gpus))


def check(settings: TrainVLMSettings, inputs: Mapping[str, Artifact], context: StageContext) -> None:
    """Say what the run needs of memory and how well trainer and server agree. Joined servers stay as they are.

    Raises:
        MismatchError: they do not agree; training would be off-policy without knowing it.
    """
    for line in memory_lines(settings, inputs["model"], context):
        context.events.message(line)
    with open_run(settings, inputs, context, open_store(context.machine), load_on_join=False) as (run, _):
        for line in run.preflight().lines():
            context.events.message(line)
    context.events.message("trainer and server agree: ready to train")
