"""Settings of an evaluation in a benchmark of vla-eval."""

from __future__ import annotations

from typing import Any, Self

from pydantic import ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from armature.components.contracts.settings import Settings
from armature.components.robots.evaluation.settings import PolicyEvaluationSettings
from armature.components.robots.policies.settings import RobotConventions


class ServedBenchmarkSettings(Settings):
    """A benchmark of vla-eval, played by `vla-eval run` in an environment of its own."""

    model_config = ConfigDict(title="Benchmark of vla-eval")

    name: str = Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,39}$")
    """Name of the benchmark in results, such as metaworld."""
    benchmark: str = Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")
    """Class of the benchmark, as in a configuration of vla-eval: module:Class."""
    params: dict[str, Any] = Field({})
    """Arguments of the class."""
    release: str = Field(min_length=1)
    """Name and version of the simulator. It does not report its own, so another version plays again only if this text
    changes too."""
    python: str = Field(min_length=1)
    """Python interpreter of the environment that has vla-eval and the simulator; relative to the folder of the run."""
    folder: str | None = None
    """Folder of the module, if it is not installed in that environment; relative to the recipe's file. An evaluation is
    made again if the module, or one beside it that it imports, changes."""
    cameras: dict[str, str] = Field(min_length=1)
    """Names of features by name of an image that the benchmark sends: agentview = observation.images.image."""
    resolution: int = Field(256, ge=2, le=4096)
    """Height and width of its images, in pixels."""
    conventions: RobotConventions
    """Conventions of its actions and observations. A policy must have the same."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait in seconds for the start of the benchmark and for each of its messages, and of the benchmark for an
    action."""

    @model_validator(mode="after")
    def _cameras_are_named_once(self) -> Self:
        conventions = self.conventions.cameras
        if sorted(self.cameras) != sorted(conventions) or len(set(self.cameras.values())) < len(self.cameras):
            raise ValueError(
                f"cameras names {', '.join(self.cameras)}, conventions.cameras {', '.join(conventions)}: "
                "name the same cameras, each with a feature of its own"
            )
        return self


class BenchmarkEvaluationSettings(PolicyEvaluationSettings):
    """Tasks and number of episodes of an evaluation in a benchmark."""

    model_config = ConfigDict(title="Evaluation in a benchmark")

    batch: PositiveInt = 4
    """Tasks played at the same time, each in a process, and at most as many as there are processes for environments
    (machine.workers.environments). Results do not depend on it."""
    rows_per_pass: PositiveInt = 1
    """Rows of one forward pass of the policy; missing rows are padded. The number changes the last bits of actions, and
    with them sampled actions. On a CPU 1 is best."""
    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of the tasks, as the benchmark has them."""
    episodes_per_task: PositiveInt = 10
    """Episodes of each task. The benchmark makes the start of episode k from k and its own arguments."""
    max_steps: PositiveInt = 500
    """Maximum number of actions of an episode."""
    videos_per_task: NonNegativeInt = 2
    """Videos of the first successes of each task, and the same number of first failures."""

    @model_validator(mode="after")
    def _tasks_once(self) -> Self:
        if len(set(self.tasks)) < len(self.tasks):
            raise ValueError(f"tasks: {', '.join(self.tasks)}: list each task once")
        return self


class EvaluateBenchmarkStageSettings(Settings):
    """Recipe sections of the stage evaluate-benchmark."""

    benchmark: ServedBenchmarkSettings
    evaluation: BenchmarkEvaluationSettings
