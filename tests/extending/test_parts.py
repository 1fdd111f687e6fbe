"""tests/extending/parts.py is an installed package here, and every part of it works without a change to Armature."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = Path(__file__).with_name("parts.py")


def entry_points() -> str:
    """Return the entry points in the module docstring of parts.py, in the format of an installed package's
    entry_points.txt."""
    result = re.findall(r'^ {4}\[project\.entry-points\."(.*)"\]\n {4}(\w+) = "(.*)"$', PARTS.read_text(), re.MULTILINE)
    return "".join(f"[{group}]\n{name} = {value}\n" for group, name, value in result)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("package")
    (folder / "parts.py").write_text(PARTS.read_text())
    (folder / "parts-1.dist-info").mkdir()
    (folder / "parts-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: parts\nVersion: 1\n")
    (folder / "parts-1.dist-info/entry_points.txt").write_text(entry_points())
    return folder


def in_a_process(package: Path, tmp_path: Path, part: str) -> Any:
    """Call the function `part` of this module in a process in which the package is installed, and return its result."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT}:{package}", "CUDA_VISIBLE_DEVICES": ""}
    code = f"import json; from tests.extending import test_parts; print(json.dumps(test_parts.{part}()))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def family() -> Any:
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    from armature import get_adapter
    from armature.components.families.family import FAMILIES, family_of
    from armature.components.models.settings import ModelSettings
    from armature.components.models.tiny import make_tiny_checkpoint

    assert ModelSettings.model_validate({"source": "tiny/vipllava", "tiny": {}}).tiny_family == "vipllava"
    folder = make_tiny_checkpoint("vipllava", Path("model"), seed=0)
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    image = Image.new("RGB", (112, 112), "red")
    inputs = processor(images=[image], text=["<image>"], return_tensors="pt")
    collator = get_adapter(folder, processor).collator
    return {
        "name": family_of(model.config).name,
        "last": list(FAMILIES)[-1],
        "components": sorted({FAMILIES["vipllava"].component_of(name) for name, _ in model.named_parameters()}),
        "image tokens": int((inputs["input_ids"] == collator.image_token_id).sum()),
        "logits": list(model(**inputs).logits.shape[:2]),
    }


def test_family(package: Path, tmp_path: Path) -> None:
    result = in_a_process(package, tmp_path, "family")
    assert result["name"] == result["last"] == "vipllava"
    assert result["components"] == ["language", "projector", "vision"]
    assert result["image tokens"] == (112 // 14) ** 2 == result["logits"][1]


def environment() -> Any:
    from armature.components.environments.make import make_environment
    from armature.components.environments.settings import EnvironmentSettings

    values = {"name": "parity", "args": {"largest": 3}, "train_tasks": 4, "heldout_tasks": 4}
    made = make_environment(EnvironmentSettings.model_validate(values))

    async def play(answer: str) -> list[float]:
        rewards = []
        for task in made.tasks("train"):
            episode = made.episode(task)
            await episode.reset()
            rewards.append((await episode.step(answer)).reward_parts["correct"])
        return rewards

    return asyncio.run(play("even"))


def test_environment(package: Path, tmp_path: Path) -> None:
    assert in_a_process(package, tmp_path, "environment") == [1.0, 0.0, 1.0, 0.0]


def reward() -> Any:
    from armature.components.rewards.make import make_rewards, reward_sources
    from armature.components.rewards.reward import RewardInput, RewardSettings

    settings = [RewardSettings.model_validate({"name": "function", "function": "parts:digits"})]
    rewards = make_rewards(settings, folder=Path())
    try:
        grades = [asyncio.run(rewards.grade(RewardInput(text, "1234", {}))) for text in ("1 2", "nothing")]
    finally:
        rewards.close()
    return grades, list(reward_sources(settings))


def test_reward(package: Path, tmp_path: Path) -> None:
    grades, sources = in_a_process(package, tmp_path, "reward")
    assert [list(each.values()) for each in grades] == [[0.5], [0.0]]
    assert "reward function function" in sources


def objective() -> Any:
    import torch

    from armature.components.vlm.objectives import Tokens, loss_of
    from armature.components.vlm.settings import TrainerSettings

    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 2.0])
    tokens = Tokens(logprobs, logprobs.detach(), logprobs.detach(), advantages, torch.tensor([0, 0, 1]), 2)
    ours = {"name": "function", "function": "parts:reinforce", "args": {"baseline": 0.5}}
    result = []
    for arguments in ("parts:reinforce", ours):
        settings = TrainerSettings.model_validate(
            {"objective": arguments, "aggregation": "sum", "learning_rate": 1e-3, "max_steps": 1}
        )
        loss = loss_of(tokens, torch.zeros(3), None, logprobs.detach(), settings).total
        result.append([loss.item(), torch.autograd.grad(loss, logprobs)[0].tolist()])
    return result


def test_objective(package: Path, tmp_path: Path) -> None:
    plain, with_baseline = in_a_process(package, tmp_path, "objective")
    assert plain == [1.0 - 2.0 + 6.0, [-1.0, 1.0, -2.0]]
    assert with_baseline == [0.5 - 3.0 + 4.5, [-0.5, 1.5, -1.5]]


def stage() -> Any:
    from armature.components.configuration.stages import STAGES, run_stage
    from armature.components.contracts.machine import Machine
    from armature.components.contracts.stages import Artifact

    Path("input").mkdir()
    Path("input/text.txt").write_text("one\nthree\nfive\n")
    text = Artifact(kind="text", path=Path("input"), digest="0" * 32)
    settings = STAGES["count"].settings.model_validate({"at_least": 4})
    made = run_stage("count", settings, {"text": text}, Machine())
    manifest = json.loads((made.path / "manifest.json").read_text())
    again = run_stage("count", settings, {"text": text}, Machine())
    return (made.path / "count.txt").read_text(), manifest["drops"], made.digest == again.digest


def test_stage(package: Path, tmp_path: Path) -> None:
    assert in_a_process(package, tmp_path, "stage") == ["2", {"short": 1}, True]


def policy() -> Any:
    from parts import Still

    from armature.components.robots.evaluation.episode import EvaluationJournal
    from armature.components.robots.evaluation.run import Evaluation
    from armature.components.robots.evaluation.schedule import plan_episodes
    from tests.robots.evaluation.playground import TASKS, Plane, settings

    chosen = settings()
    planned = plan_episodes(chosen, {"libero_spatial": TASKS})
    evaluation = Evaluation(chosen, planned, EvaluationJournal(Path("episodes.jsonl")), lambda finished, latest: None)
    outcomes = dict(evaluation.run(Still(), [Plane()]))
    return len(outcomes), sum(outcome.success for outcome in outcomes.values())


def test_policy(package: Path, tmp_path: Path) -> None:
    episodes, solved = in_a_process(package, tmp_path, "policy")
    assert episodes == 21 and solved < episodes
