"""The recipe of `train-vlm`: its sections, and the check before a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from armature.components.configuration.recipes import MachineSection, SettingRow
from armature.components.configuration.tables import SUFFIX
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact, StageContext
from armature.components.evaluation.settings import (
    EnvironmentSection,
    ModelSection,
    ModelSections,
    ServerSection,
    TrainEvaluationSettings,
)
from armature.components.machine.project import project_path
from armature.components.rl.settings import PreflightSettings, TrainVLMSettings, teacher_input
from armature.components.rollouts.settings import BatchSettings, RolloutSettings
from armature.components.vlm.settings import TeacherSettings, TrainerSettings, WarmStartSettings


class TrainVlm(ModelSections):
    """Train a model on an environment's tasks with GRPO on rollouts from a pool of vLLM servers, and evaluate it.

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
    """The rollouts of each step, and the sampling of their tokens."""
    batches: BatchSettings
    """The conversion of rollouts to training samples."""
    trainer: TrainerSettings
    """Objective, optimizer and number of steps."""
    preflight: PreflightSettings
    """The agreement of trainer and servers that is checked before the first step and in every step."""
    evaluation: TrainEvaluationSettings
    """Evaluation of the trained model and during training: the tasks, their number, and the reward that solves them."""
    machine: MachineSection = Machine()
    warm_start: WarmStartSettings | None = None
    """Training on demonstrations before the training on rewards; omit it for none."""
    teacher: TeacherSettings | None = None
    """A teacher that scores the sampled tokens (on-policy distillation); omit it for none."""

    def refuse_sources(self) -> None:
        """Refuse a model name that cannot be fetched: a missing folder, or a hub name without a revision."""
        from armature.components.models.gguf import model_source
        from armature.components.models.source import check_source_name

        if self.model.tiny is None:
            check_source_name(model_source(self.model.source), self.model.revision)
        for teacher in self.teacher.models.values() if self.teacher is not None else ():
            if teacher.source:
                check_source_name(model_source(teacher.source), teacher.revision)

    def refuse_ahead(self) -> None:
        super().refuse_ahead()
        self.made_teachers(lambda *_, **__: None)

    def made_teachers(self, make: Callable[..., Artifact | None]) -> dict[str, Artifact]:
        """Return the checkpoints of teachers that other recipes train, by the names of the inputs of `train-vlm`.

        Args:
            make: called with the name of a stage, the sections of a teacher's recipe, and the stage's inputs by name.
                It returns the stage's artifact; with None, the teacher is left out.

        Raises:
            ConfigurationError: a recipe does not train a model on rewards, or has a teacher itself.
        """
        from armature.components.configuration import load_recipe

        made: dict[str, Artifact] = {}
        for kind, teacher in self.teacher.models.items() if self.teacher is not None else ():
            if not (name := teacher.recipe):
                continue
            sections = load_recipe(project_path(name) if name.endswith(SUFFIX) else name).values
            if not isinstance(sections, TrainVlm) or sections.teacher is not None:
                raise ConfigurationError(
                    f"{name} is not a recipe of train-vlm without a teacher",
                    code="teacher_recipe_not_usable",
                    where="teacher.recipe",
                    remedy="name a recipe that trains a model on rewards alone, or set teacher.source to a checkpoint",
                )
            sections = sections.model_copy(update={"machine": self.machine})
            tasks, model = make("tasks", sections), make("model", sections)
            for stage in ("train-vlm",) if sections.warm_start is None else ("warm-start", "train-vlm"):
                model = make(stage, sections, tasks=tasks, model=model) if tasks and model else None
            if model:
                made[teacher_input(kind)] = model
        return made

    def check_stages(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> None:
        """Check, with tasks and model at hand, that memory suffices and that trainer and servers agree."""
        from armature.components.rl.open import check

        settings, inputs, context = self._checked(inputs, say)
        check(settings, inputs, context, lambda run: None)

    def check_settings(self, inputs: Mapping[str, Artifact], say: Callable[[str], None]) -> list[SettingRow]:
        """Also check that settings act, with rollouts of the servers and a learner in this process."""
        import torch

        from armature.components.models.source import locate
        from armature.components.rl.open import base_weights, check
        from armature.components.rl.setting_checks import check_settings
        from armature.components.rl.trial import play_trial

        settings, inputs, context = self._checked(inputs, say)
        trial = check(settings, inputs, context, play_trial)
        weights = base_weights(locate(inputs["model"].path, settings.model.revision), settings.model, context.workspace)
        gpus = self.machine.trainer.gpus
        return check_settings(settings, weights, trial, torch.device("cuda", gpus[0]) if gpus else torch.device("cpu"))

    def _checked(
        self, inputs: Mapping[str, Artifact], say: Callable[[str], None]
    ) -> tuple[TrainVLMSettings, dict[str, Artifact], StageContext]:
        """Return the settings and inputs of the training and the context of a check, after counting the tasks to
        evaluate."""
        from armature.components.configuration.stages import (
            STAGES,
            TerminalEvents,
            ThreadUnits,
            find_made,
            fingerprint,
            open_store,
        )
        from armature.components.evaluation.results import planned_tasks
        from armature.components.rl.stage import TRAIN_VLM_STAGE, trained_teachers

        settings = TRAIN_VLM_STAGE.resolve(self.settings_for(TrainVLMSettings), inputs, say)
        teachers = self.made_teachers(
            lambda name, of, **made: find_made(name, of.settings_for(STAGES[name].settings), made, self.machine)
        )
        if missing := [name for name in trained_teachers(settings) if name not in teachers]:
            say(f"{', '.join(missing)}: not checked, because no recipe has trained it yet")
            settings, teachers = settings.model_copy(update={"teacher": None}), {}
        inputs = {**inputs, **teachers}
        planned_tasks(self.evaluation, inputs["tasks"].path)
        store, key = open_store(self.machine), f"check-{fingerprint(TRAIN_VLM_STAGE, settings, inputs)}"
        workspace = store.workspace("train-vlm", key)
        return (
            settings,
            inputs,
            StageContext(self.machine, TerminalEvents(), ThreadUnits(), workspace, store.images, key),
        )
