"""Settings of an RL run: the pre-flight, and the sections on which the trained weights depend."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import ConfigDict, PositiveFloat, PositiveInt, field_validator, model_validator

from armature.components.contracts.settings import Settings
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.settings import HeldoutSetSettings, TrainEvaluationSettings
from armature.components.inference.settings import ServerSettings
from armature.components.models.settings import ModelSettings
from armature.components.rollouts.settings import BatchSettings, RolloutSettings
from armature.components.vlm.settings import TeacherSettings, TrainerSettings


def teacher_input(kind: str) -> str:
    """Return the name of the input of train-vlm with a teacher of tasks of this kind that another recipe trains.

    >>> teacher_input(""), teacher_input("charts")
    ('teacher', 'teacher-charts')
    """
    return f"teacher-{kind}" if kind else "teacher"


class PreflightSettings(Settings):
    """Limits on the disagreement of trainer and servers, before the first step and in every step."""

    model_config = ConfigDict(title="Pre-flight")

    groups: PositiveInt = 4
    """Number of groups of rollouts for which trainer and servers compare log-probs before the first step."""
    max_mismatch_kl: PositiveFloat = 1e-3
    """Largest k3 KL(server || trainer) before the first step; above it the training is refused."""
    max_step_mismatch_kl: PositiveFloat = 0.1
    """Largest k3 KL(server || trainer) of a step's first update. It is not checked for rollouts of earlier weights,
    which max_staleness allows, because the policy has changed since then."""
    step_mismatch: Literal["stop", "warn"] = "stop"
    """Stop the run before it saves a step above max_step_mismatch_kl (stop), or only print a warning (warn)."""


class LoopSettings(Settings):
    """The settings that the RL loop needs, independent of environment and model."""

    rollouts: RolloutSettings
    batches: BatchSettings
    trainer: TrainerSettings
    preflight: PreflightSettings
    teacher: TeacherSettings | None = None


class TrainVLMSettings(Settings):
    """The sections of a train-vlm recipe on which the trained weights depend."""

    model: ModelSettings
    environment: EnvironmentSettings
    inference: ServerSettings
    rollouts: RolloutSettings
    batches: BatchSettings
    trainer: TrainerSettings
    preflight: PreflightSettings
    evaluation: HeldoutSetSettings | None = None
    teacher: TeacherSettings | None = None

    @model_validator(mode="before")
    @classmethod
    def _choose_teachers_by_kind(cls, values: Any) -> Any:
        """Take the field that has a task's kind from the evaluation, unless the section `teacher` names it."""
        teacher, evaluation = values.get("teacher"), values.get("evaluation")
        if not isinstance(teacher, TeacherSettings) or not teacher.kinds or teacher.kind_field:
            return values
        field = evaluation.kind_field if isinstance(evaluation, TrainEvaluationSettings) else ""
        if not field:
            raise ValueError("teacher.kinds needs to know a task's kind: set teacher.kind_field")
        return {**values, "teacher": teacher.model_copy(update={"kind_field": field})}

    @field_validator("evaluation", mode="before")
    @classmethod
    def _take_evaluation_during_training(cls, value: Any) -> Any:
        """Take only the evaluation during training: evaluating the trained model does not change its weights."""
        return value.heldout_set if isinstance(value, TrainEvaluationSettings) else value

    @model_validator(mode="after")
    def _check_in_flight_updates_are_not_deterministic(self) -> Self:
        if self.rollouts.in_flight_updates and self.inference.deterministic:
            raise ValueError(
                "rollouts.in_flight_updates makes runs with the same seed differ, but inference.deterministic promises "
                "the opposite: omit one of the two"
            )
        return self

    @model_validator(mode="after")
    def _check_quantized_servers_are_corrected(self) -> Self:
        corrected = self.trainer.correction.mode != "none" or self.trainer.objective.name == "mask_ratio"
        if self.inference.quantization is not None and not corrected:
            raise ValueError(
                "inference.quantization: servers that compute in 8 bits sample from another distribution than the "
                'trainer, which biases every update: set trainer.correction.mode = "truncate"'
            )
        return self

    @model_validator(mode="after")
    def _check_the_teacher_sees_all_groups(self) -> Self:
        if self.teacher is not None and self.batches.skip_zero_advantage:
            raise ValueError(
                "batches.skip_zero_advantage leaves out groups with equal rewards, from which a teacher's scores still "
                "teach: set batches.skip_zero_advantage = false"
            )
        return self

    @property
    def loop(self) -> LoopSettings:
        """The sections that the RL loop needs."""
        return LoopSettings(
            rollouts=self.rollouts,
            batches=self.batches,
            trainer=self.trainer,
            preflight=self.preflight,
            teacher=self.teacher,
        )
