"""The commands of a trainer service that do not depend on what is trained, as every rank carries them out."""

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
    """One rank: what it trains, its checkpoints, and the results of the steps that the weights contain.

    Args:
        who: see `armature.components.training.checkpoints.identity`.
        keep: newest checkpoints that stay.
        remembered: newest steps whose results can be asked for again.
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
        """What `train` and `perform` need of the command. Whatever it raises refuses the command."""

    @abstractmethod
    def train(self, command: Command, prepared: Any) -> dict[str, float]:
        """Make the next step."""

    @abstractmethod
    def perform(self, command: Command, prepared: Any) -> Any:
        """Carry out a command that is not one of all services."""

    def check(self, command: Command) -> Any:
        """What can be refused before anything is changed, and what the command needs.

        Raises:
            ConfigurationError: a step out of order, or weights of another version.
        """
        done = self._engine.steps_done
        if command["name"] == "step" and command["step"] != done + 1:
            raise ConfigurationError(
                f"step {command['step']} was requested, but {done} steps are applied",
                code="step_out_of_order",
                where="trainer service",
                remedy=f"train step {done + 1} first",
            )
        if command.get("version", done) != done:
            raise ConfigurationError(
                f"version {command['version']} was requested, but the weights are of {done} steps",
                code="version_mismatch",
                where="trainer service",
                remedy="publish right after the step",
            )
        return self.prepare(command)

    def recorded(self, command: Command) -> dict[str, float] | None:
        """The result of a step that is applied already.

        Raises:
            ConfigurationError: that step was trained on another batch.
        """
        known = self.results.get(command.get("step", 0)) if command["name"] == "step" else None
        if known is None:
            return None
        if _named(known["batch"]) != _named(command.get("batch")):
            raise ConfigurationError(
                f"step {command['step']} was trained on another batch",
                code="batch_mismatch",
                where=f"{known['batch']} and now {command.get('batch')}",
                remedy="resume from a checkpoint before that step to train it again",
            )
        metrics: dict[str, float] = known["metrics"]
        return metrics

    def run(self, command: Command, prepared: Any) -> Any:
        """Carry out a checked command; on every rank."""
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


def _named(batch: str | None) -> tuple[str, ...]:
    """Kind and fingerprint of a batch: another machine has it in another store."""
    return Path(batch or "").parts[-2:]
