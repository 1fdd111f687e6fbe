"""Reports of `MultimodalGRPOTrainer`: progress, callbacks like the ones of transformers' Trainer, and the result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState

from armature.components.configuration.stages import TerminalEvents
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.stages import TRAINING
from armature.components.rl.config import MultimodalRLConfig

METHODS = ("on_train_begin", "on_step_end", "on_log", "on_evaluate", "on_save", "on_train_end")
"""Methods of callbacks that are called."""


def made_callbacks(callbacks: Any) -> list[Any]:
    """Return the callbacks of a trainer, which may be a single one, an object or a class.

    Raises:
        ConfigurationError: one of them has no method that would be called.
    """
    callbacks = callbacks if isinstance(callbacks, list | tuple) else [callbacks] if callbacks else []
    made = [each() if isinstance(each, type) else each for each in callbacks]
    for each in made:
        if not any(hasattr(each, method) for method in METHODS):
            raise ConfigurationError(
                f"{type(each).__name__} has no method of a callback",
                code="callback_without_method",
                where="callbacks",
                remedy=f"give it one of {', '.join(METHODS)}",
            )
    return made


class TrainingResult(dict[str, float]):
    """The metrics of a training's last step. Metrics named `heldout/...` belong to the weights in `final`.

    Attributes:
        final: the folder of the trained model. It has the weights of the best evaluation, or without evaluations those
            after the last step.
        best: metrics of the best evaluation, such as `best/accuracy` and `best/step`; empty without evaluations.
        history: metrics of all steps, oldest first. Step 0 has only an evaluation.
    """

    def __init__(self, final: Path, best: dict[str, float], history: list[dict[str, float]]) -> None:
        row = next((row for row in history if row["step"] == best.get("best/step")), {})
        heldout = {name: value for name, value in row.items() if name.startswith("heldout/")}
        super().__init__({**history[-1], **heldout})
        self.final, self.best, self.history = final, best, history


class TrainerEvents(TerminalEvents):
    """Shows a training on the terminal and calls its callbacks.

    A callback's method is called as method(config, state, control, **values). `state` has `global_step`, `max_steps`
    and `log_history`. Of `control` only `should_training_stop` has an effect. An exception in a callback ends the
    training.
    """

    def __init__(self, config: MultimodalRLConfig, callbacks: Sequence[Any]) -> None:
        super().__init__()
        self._config, self._callbacks = config, callbacks
        self._state, self._control = TrainerState(max_steps=config.max_steps), TrainerControl()

    def begin(self, done: int) -> None:
        """Call the callbacks' method `on_train_begin`. The steps up to `done` are already made."""
        self._state.global_step = done
        self._call("on_train_begin")

    def metrics(self, values: Mapping[str, float], step: int) -> None:
        """Call the methods that belong to the end of a step, with its metrics as `logs` and `metrics`."""
        config, self._state.global_step = self._config, step
        self._state.log_history.append({**values, "step": step})
        if step:
            self._call("on_step_end")
        self._call("on_log", logs=dict(values))
        if evaluated := {name: value for name, value in values.items() if name.startswith("heldout/")}:
            self._call("on_evaluate", metrics=evaluated)
        if step and step % config.save_steps == 0 and step < config.max_steps:
            self._call("on_save")

    def end(self, metrics: Mapping[str, float]) -> None:
        """Call the callbacks' method `on_train_end` with the metrics of the trained model."""
        self._call("on_train_end", metrics=dict(metrics))

    def stopped(self) -> bool:
        """Return True if a callback has set `control.should_training_stop`."""
        return bool(self._control.should_training_stop)

    def progress(self, name: str, done: int, total: int, **postfix: float) -> None:
        """Show a progress bar on a terminal, and print a line of metrics for every `log_every_steps`-th step."""
        if self._lines is None or name != TRAINING:
            super().progress(name, done, total, **postfix)
        else:
            self._lines.line(name, done, total, postfix)  # rollouts then need no line at their end
        chosen = self._lines is None or "log_every_steps" in self._config.model_fields_set
        every = self._config.log_every_steps if chosen else 1
        if name == TRAINING and postfix and (done % every == 0 or done in (1, total)):
            self.message(f"Step {done}/{total}: " + ", ".join(f"{key}={value:.4g}" for key, value in postfix.items()))

    def _call(self, method: str, **values: Any) -> None:
        for callback in self._callbacks:
            if (call := getattr(callback, method, None)) is not None:
                call(self._config, self._state, self._control, **values)
