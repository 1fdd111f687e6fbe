"""Evaluations of a scripted policy, their bundles, and lies in these."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.configuration.stages import run_stage
from armature.components.contracts.machine import Machine
from armature.components.contracts.stages import Artifact
from armature.components.environments.settings import EnvironmentSettings
from armature.components.evaluation.settings import EvaluateStageSettings
from armature.components.inference.client import Completion
from tests.evaluation.test_results import COLORS, INFERENCE, VALUES
from tests.inference.conftest import write_checkpoint
from tests.rollouts.conftest import reply

EPISODES = 40
ENVIRONMENT = COLORS | {"train_tasks": 1, "heldout_tasks": EPISODES}
PLAN = VALUES | {"sampling": {"temperature": 1.0, "max_tokens": 8, "top_p": 1.0, "top_k": 0}}


class ScriptedPool:
    """A replacement of the server pool. The policy's configuration says with which probability ("skill") it looks at
    the image; else it guesses red. The seed of a request and the weights decide, so answers repeat."""

    promised = True

    def __init__(self, weights: Path, *arguments: Any, **options: Any) -> None:
        configuration = json.loads((weights / "config.json").read_text())
        self.skill, self.name = configuration["skill"], configuration["name"]
        self.repeatability = SimpleNamespace(promised=self.promised)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None: ...

    async def complete(self, messages: Sequence[dict[str, Any]], sampling: object, seed: int) -> Completion:
        (url,) = (part["image_url"]["url"] for part in messages[-1]["content"] if part["type"] == "image_url")
        red, _, blue = np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))).mean((0, 1))
        drawn = int.from_bytes(sha256(f"{self.name}/{seed}".encode()).digest()[:4])
        looks = drawn < self.skill * 2**32
        return reply([], "blue" if looks and blue > red else "red", drawn)


def write_policy(store: Path, name: str, skill: float) -> Artifact:
    """Write the artifact of a scripted policy to the store."""

    def fill(folder: Path) -> None:
        checkpoint = write_checkpoint(folder / "checkpoint")
        (checkpoint / "config.json").write_text(json.dumps({"skill": skill, "name": name}))
        letters = {chr(code): code for code in range(256)} | {"<end>": 256}
        Tokenizer(WordLevel(letters, "<end>")).save(str(checkpoint / "tokenizer.json"))
        write_manifest(folder, kind="model", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    return ArtifactStore(store).write("model", name, fill)


def evaluate(machine: Machine, policy: Artifact, **plan: Any) -> Artifact:
    """Evaluate a scripted policy; `plan` changes settings of the evaluation."""
    tasks = run_stage("tasks", EnvironmentSettings.model_validate(ENVIRONMENT), {}, machine)
    settings = EvaluateStageSettings.model_validate({"evaluation": PLAN | plan, "inference": INFERENCE})
    return run_stage("evaluate", settings, {"tasks": tasks, "model": policy}, machine)


def rewritten(
    path: Path,
    claims: Callable[[dict[str, Any]], object] = lambda document: None,
    rows: Callable[[list[dict[str, Any]]], object] = lambda rows: None,
) -> Path:
    """Write a copy of a bundle in which the functions have changed the claims and the rows. Return its path."""
    target = path.with_name("lie.zip")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(target, "w") as lie:
        for name in archive.namelist():
            content = archive.read(name)
            if name == "bundle.json":
                claims(document := json.loads(content))
                content = json.dumps(document).encode()
            if name == "episodes.jsonl":
                rows(listed := [json.loads(line) for line in content.splitlines()])
                content = "\n".join(map(json.dumps, listed)).encode()
            lie.writestr(name, content)
    return target
