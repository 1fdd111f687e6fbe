"""The recipe of train-vlm."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from armature.components.configuration.recipes import MachineSection
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.evaluation.settings import (
    EnvironmentSection,
    ModelSection,
    ModelSections,
    ServerSection,
    TrainEvaluationSettings,
)
from armature.components.rl.settings import PreflightSettings, TrainVLMSettings
from armature.components.rollouts.settings import BatchSettings, RolloutSettings
from armature.components.vlm.settings import TrainerSettings, WarmStartSettings


class TrainVlm(ModelSections):
    """Tasks and a model, GRPO on rollouts from a pool of vLLM servers, and an evaluation of the result.

    With a warm start the model is first trained on demonstrations.
    """

    FLOW = "armature.flows.train_vlm.train_vlm"
    JOINED = (TrainVLMSettings,)
    FIRST_STAGES = ("tasks", "model")
    MEMORY = "armature.components.planning.memory:recipe_memory"
    PLAN = "armature.components.planning.step:plan_language"

    model: ModelSection
    environment: EnvironmentSection
    inference: ServerSection
    rollouts: RolloutSettings
    """How much is played per step, and how tokens are sampled."""
    batches: BatchSettings
    """From rollouts to training samples."""
    trainer: TrainerSettings
    """Objective, optimizer and number of steps."""
    preflight: PreflightSettings
    """What trainer and server must agree on before the first step."""
    evaluation: TrainEvaluationSettings
    """Which tasks are played, how often, and what counts as solved: by the trained model, and during training."""
    machine: MachineSection = Machine()
    warm_start: WarmStartSettings | None = None
    """Training on demonstrations before that on rewards; leave it out for none."""

    def refuse_sources(self) -> None:
        from armature.components.machine.project import project_source
        from armature.components.models.source import check_source_name

        if self.model.tiny is None:
            check_source_name(project_source(self.model.source), self.model.revision)

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        from armature.components.configuration.stages import TerminalEvents, ThreadUnits, fingerprint, open_store
        from armature.components.evaluation.results import planned_tasks
        from armature.components.rl.open import check
        from armature.components.rl.stage import TRAIN_VLM_STAGE

        settings = TRAIN_VLM_STAGE.resolve(self.settings_for(TrainVLMSettings), inputs, say)
        planned_tasks(self.evaluation, inputs["tasks"].path)
        store, key = open_store(self.machine), f"check-{fingerprint(TRAIN_VLM_STAGE, settings, inputs)}"
        workspace = store.workspace("train-vlm", key)
        context = StageContext(self.machine, TerminalEvents(), ThreadUnits(), workspace, store.images, key)
        check(settings, inputs, context)
