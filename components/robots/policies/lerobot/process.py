"""A policy that LeRobot computes in a process of its own environment, as a `RobotPolicy`."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.installation import home_folder
from armature.components.contracts.robots import RobotObservation
from armature.components.machine.workers.channel import WorkerError
from armature.components.machine.workers.process import WorkerProcess
from armature.components.machine.workers.requests import ANYTHING
from armature.components.robots.policies.settings import LeRobotPolicySettings
from armature.components.robots.policies.source import read_json

WORKER = "armature.components.robots.policies.lerobot.worker"
PYTHON = "ARMATURE_LEROBOT_PYTHON"
"""Environment variable with the Python interpreter that has LeRobot."""
LARGEST_ANSWER = 2**24
ATTEMPTS = 3
"""Attempts at a prediction whose process dies."""
PROCESSORS = ("policy_preprocessor.json", "policy_postprocessor.json")
"""Files with the steps before and after the policy, of which LeRobot makes objects."""
EMPTY = "observation.images.empty_camera_"
"""Beginning of the names of cameras that a policy replaces by a mask."""


@dataclass(frozen=True)
class LeRobotFacts:
    """Facts about a policy from `config.json` of its checkpoint.

    cameras: sizes of images, (channels, height, width), by name in the policy's order.
    """

    kind: str
    cameras: Mapping[str, tuple[int, ...]]
    state_dimensions: int
    action_dimensions: int
    n_action_steps: int
    most_action_steps: int


def lerobot_facts(folder: Path) -> LeRobotFacts:
    """Read `config.json` of a checkpoint that LeRobot saved, and check the files of its processors.

    Raises:
        ConfigurationError: the policy's actions depend on earlier observations or answers.
        DataError: a file is missing or invalid, or a processor would run other code than LeRobot's.
    """
    file = folder / "config.json"
    config = read_json(file)
    try:
        kind, inputs, shape = config["type"], config["input_features"], config["output_features"]["action"]["shape"]
        cameras = {name: tuple(each["shape"]) for name, each in inputs.items() if each["type"] == "VISUAL"}
        facts = LeRobotFacts(
            kind=str(kind),
            cameras={name: sizes for name, sizes in cameras.items() if not name.startswith(EMPTY)},
            state_dimensions=int(inputs["observation.state"]["shape"][0]),
            action_dimensions=int(shape[0]),
            n_action_steps=int(config["n_action_steps"]),
            most_action_steps=int(config.get("chunk_size", config["n_action_steps"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise DataError(
            f"the file is not the configuration of a LeRobot policy with images and a state: {error!r:.200}",
            code="lerobot_config_invalid",
            where=str(file),
            remedy="name the folder pretrained_model of a training with LeRobot",
        ) from error
    stateless = {"n_obs_steps": 1, "temporal_ensemble_coeff": None}
    for name, value in stateless.items():
        if config.get(name, value) != value:
            raise ConfigurationError(
                f"{name} is {config[name]}: the policy's actions depend on earlier steps, and each chunk is asked for "
                "on its own",
                code="lerobot_policy_unsupported",
                where=f"policy {kind}, {file}",
                remedy="evaluate a policy with n_obs_steps = 1 and without temporal ensembling",
            )
    for name in PROCESSORS:
        _refuse_other_code(folder / name)
    return facts


def _refuse_other_code(file: Path) -> None:
    """Check that all steps of a processor are LeRobot's own, and that their tensors are beside the file.

    LeRobot imports and calls what the key `class` of a step names, which could be any function of any module.

    Raises:
        DataError: the file is invalid, or a step is not in LeRobot's registry or reads from another folder.
    """
    steps = read_json(file).get("steps")
    for step in steps if isinstance(steps, list) else [None]:
        tensors = step.get("state_file") if isinstance(step, dict) else None
        if (
            not isinstance(step, dict)
            or not isinstance(step.get("registry_name"), str)
            or (tensors is not None and (not isinstance(tensors, str) or Path(tensors).name != tensors))
        ):
            raise DataError(
                f"a step of the processor is not from LeRobot's registry with its tensors beside it: {step!r:.200}",
                code="lerobot_step_refused",
                where=str(file),
                remedy="evaluate a policy with LeRobot's own steps, or serve this one: policy.server",
            )


def lerobot_python() -> str:
    """Return the Python interpreter that has LeRobot.

    Raises:
        ConfigurationError: it does not exist.
    """
    python = os.environ.get(PYTHON) or str(home_folder() / ".venv-lerobot/bin/python")
    if shutil.which(python) is None:
        raise ConfigurationError(
            "there is no Python interpreter with LeRobot",
            code="lerobot_missing",
            where=python,
            remedy=f"armature setup --lerobot, or set {PYTHON} to the interpreter of an environment with LeRobot",
        )
    return python


class LeRobotPolicy:
    """Client of a process that computes a LeRobot policy.

    Rows are computed one by one, each from its own seed, so they do not depend on each other.

    Example:
        >>> def first_action(settings: LeRobotPolicySettings, observation: RobotObservation) -> NDArray[np.float32]:
        ...     with LeRobotPolicy(settings, Path(settings.path), n_action_steps=None, rows=1, threads=1) as policy:
        ...         return policy.predict([observation], seeds=[0])[0, 0]
    """

    seeded = True

    def __init__(
        self, settings: LeRobotPolicySettings, folder: Path, n_action_steps: int | None, rows: int, threads: int
    ) -> None:
        """Start the process and load the policy with the first prediction.

        Args:
            folder: The checkpoint that LeRobot saved.
            n_action_steps: Number of actions to execute of a chunk; None: the policy's own.
            rows: Number of observations of one request to the process.
            threads: Number of CPU threads of the process.

        Raises:
            ConfigurationError: LeRobot is missing, or see `lerobot_facts`.
            DataError: the checkpoint is invalid.
        """
        facts = lerobot_facts(folder)
        self.n_action_steps = n_action_steps or facts.n_action_steps
        self.action_dimensions, self.rows_per_pass = facts.action_dimensions, rows
        if self.n_action_steps > facts.most_action_steps:
            raise ConfigurationError(
                f"{self.n_action_steps} actions should be executed, but a chunk has only {facts.most_action_steps}",
                code="chunk_too_short",
                where="evaluation.n_action_steps",
                remedy=f"set evaluation.n_action_steps to at most {facts.most_action_steps}",
            )
        self._settings, self._facts = settings, facts
        self._process = WorkerProcess(
            WORKER,
            {"folder": str(folder.resolve()), "n_action_steps": self.n_action_steps, "threads": threads},
            timeout=settings.timeout_s,
            env={"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)},
            most_bytes=LARGEST_ANSWER,
            python=lerobot_python(),
        )

    @property
    def pid(self) -> int | None:
        """PID of the process while it runs, else None."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()

    def prepared(self, observation: RobotObservation) -> RobotObservation:
        """Return the observation unchanged: LeRobot does all preprocessing."""
        return observation

    def predict(self, observations: Sequence[RobotObservation], seeds: Sequence[int]) -> NDArray[np.float32]:
        """Predict chunks, row i from observation i and seed i: (N, n_action_steps, action dimensions) float32.

        Raises:
            WorkerError: the process does not answer in time, fails, or dies in each attempt.
        """
        images = [{name: each.images[name] for name in self._facts.cameras} for each in observations]
        states = np.stack([each.state for each in observations])
        request = images, states, [each.task for each in observations], list(seeds)
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = self._process.call("predict", *request, reply=ANYTHING)
                break
            except WorkerError as error:
                if attempt == ATTEMPTS or error.code not in ("worker_ended", "idle_worker_lost"):
                    raise self._named(error) from error
        expected = (len(observations), self.n_action_steps, self.action_dimensions)
        if not isinstance(answer, np.ndarray) or answer.dtype != np.float32 or answer.shape != expected:
            raise WorkerError(
                f"LeRobot's actions have the shape {getattr(answer, 'shape', None)}, not {expected}",
                code="worker_reply_invalid",
                where=self._settings.path,
                remedy="config.json does not describe these weights: name a folder that LeRobot saved",
            )
        return answer

    def _named(self, error: WorkerError) -> WorkerError:
        """Return an error of the process with the checkpoint's folder and what to do, in place of the request."""
        remedies = {
            "worker_failed": "LeRobot cannot load or compute this checkpoint: evaluate a complete folder "
            "pretrained_model of LeRobot's version in that environment",
            "worker_timeout": "set a larger policy.lerobot.timeout_s, or evaluation.rows_per_pass = 1",
        }
        remedy = remedies.get(error.code, "see the lines above; it may have needed more memory than there is")
        return WorkerError(
            error.what, code=error.code, where=f"policy.lerobot.path, {self._settings.path}", remedy=remedy
        )

    def facts(self) -> dict[str, Any]:
        """Return facts about the policy for reports."""
        return {
            "path": self._settings.path,
            "type": self._facts.kind,
            "n_action_steps": self.n_action_steps,
            "seeded": True,
            "conventions": self._settings.conventions.model_dump(mode="json"),
        }
