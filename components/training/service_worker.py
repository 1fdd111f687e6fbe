"""Base class of the workers of a trainer service: the commands that are the same for every kind of model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.metrics import read_floats
from armature.components.training.checkpoints import Checkpoints
from armature.components.training.engine import TrainingEngine
from armature.components.training.service_settings import ServiceSettings

Command = dict[str, Any]


class ServiceWorker(ABC):
    """One rank of a trainer service: its learner, its checkpoints, and the results of the steps applied so far.

    Args:
        who: the result of `armature.components.training.checkpoints.identity`.
        keep: number of newest checkpoints to keep.
        remembered: number of newest steps whose results are stored, so that a repeated command gets the same result.
    """

    def __init__(
        self, settings: ServiceSettings, learner: TrainingEngine[Any], who: dict[str, Any], keep: int, remembered: int
    ) -> None:
        self.settings, self.ranks = settings, learner.ranks
        self._engine, self._remembered = learner, remembered
        self._checkpoints = Checkpoints(settings.checkpoints, who, learner.ranks, keep)
        self.results: dict[int, dict[str, Any]] = {}

    @abstractmethod
    def prepare(self, command: Command) -> Any:
        """Check a command and return the data that `train` or `perform` needs. An exception refuses the command."""

    @abstractmethod
    def train(self, command: Command, prepared: Any) -> dict[str, float]:
        """Make the next training step and return its metrics."""

    @abstractmethod
    def perform(self, command: Command, prepared: Any) -> Any:
        """Carry out a command that only this kind of worker has."""

    def check(self, command: Command) -> Any:
        """Check a command before anything changes, and return the data that `prepare` made for it.

        Raises:
            ConfigurationError: a step is out of order, or the command names another version of the weights.
        """
        done = self._engine.steps_done
        if command["name"] == "step" and command["step"] != done + 1:
            raise ConfigurationError(
                f"step {command['step']} was requested, but the trainer has applied {done} steps",
                code="step_out_of_order",
                where="trainer service",
                remedy=f"train step {done + 1} first",
            )
        if command.get("version", done) != done:
            raise ConfigurationError(
                f"version {command['version']} was requested, but the weights have version {done}",
                code="version_mismatch",
                where="trainer service",
                remedy="publish a version right after its step",
            )
        return self.prepare(command)

    def recorded(self, command: Command) -> dict[str, float] | None:
        """Return the metrics of a step that was applied before; None for any other command.

        Raises:
            ConfigurationError: the step was applied with another batch.
        """
        result = self.results.get(command.get("step", 0)) if command["name"] == "step" else None
        if result is None:
            return None
        if _batch_name(result["batch"]) != _batch_name(command.get("batch")):
            raise ConfigurationError(
                f"step {command['step']} was trained on another batch",
                code="batch_mismatch",
                where=f"{result['batch']} and now {command.get('batch')}",
                remedy="resume from a checkpoint before that step to train it again",
            )
        metrics: dict[str, float] = result["metrics"]
        return metrics

    def run(self, command: Command, prepared: Any) -> Any:
        """Carry out a command that `check` accepted. Every rank calls it."""
        match command["name"]:
            case "step":
                metrics = self.train(command, prepared)
                self.results[command["step"]] = {"batch": command.get("batch"), "metrics": metrics}
                self.results.pop(command["step"] - self._remembered, None)
                return metrics
            case "save":
                state = {"results": {str(step): result for step, result in self.results.items()}}
                return str(self._checkpoints.save(self._engine, state))
            case "settle":
                self._checkpoints.wait()
                return None
            case "resume":
                return self._resume()
            case _:
                return self.perform(command, prepared)

    def _resume(self) -> int:
        newest = self._checkpoints.newest
        if newest is not None:
            state = self._checkpoints.load(self._engine, newest)
            self.results = {
                int(step): result | {"metrics": read_floats(result["metrics"])}
                for step, result in state["results"].items()
            }
        return self._engine.steps_done


def _batch_name(batch: str | None) -> tuple[str, ...]:
    """Return the last parts of a batch's path, its kind and fingerprint. The rest depends on the machine's store."""
    return Path(batch or "").parts[-2:]
