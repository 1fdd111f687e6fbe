"""The stage `sft` and TRL's trainers on the same rows and the same tiny model, in fp32 on a CPU.

Rows have one or two images of several sizes and one or two answers. A chat template with generation markers says to
both which tokens are trained on; it ends with the answer, because TRL trains on all of it in a pair.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from armature.components.configuration.stages import run_stage
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.vlm.settings import SupervisedSettings
from armature.components.vlm.sft.settings import (
    ConversationSettings,
    ConversationsStageSettings,
    DPOSettings,
    PairColumns,
    SupervisedStageSettings,
)
from benchmarks.sft_gpu import TEMPLATE, in_our_order
from benchmarks.trl_step import PYTHON, ROOT
from tests.builders import make_machine
from tests.images import noise
from tests.vlm.conftest import model_settings

pytestmark = pytest.mark.slow
ROWS, ROWS_PER_STEP, BETA = 24, 8, 0.5
OPTIONS = {"rows": ROWS_PER_STEP, "learning_rate": 1e-3, "epsilon": 1e-3, "beta": BETA}
WORDS = ["red", "green", "blue", "one", "two", "left of", "right of", "above", "below", "it is", "the"]


def rows_of(method: str) -> datasets.Dataset:
    rng = np.random.default_rng(0)

    def text() -> str:
        return " ".join(rng.choice(WORDS, rng.integers(2, 9)))

    def said(*roles: str) -> list[dict[str, str]]:
        return [{"role": role, "content": text()} for role in roles]

    rows = []
    for number in range(ROWS):
        images = [noise(10 * number + k, width=56 * int(rng.integers(1, 4))) for k in range(1 + number % 2)]
        row: dict[str, Any] = {"images": images, "split": "train"}
        before = ["user", "assistant"] * (number % 3 == 0)
        if method == "sft":
            row["messages"] = said(*before, "user", "assistant")
        else:
            row |= {"prompt": said(*before, "user"), "chosen": said("assistant"), "rejected": said("assistant")}
        rows.append(row)
    features = datasets.Features(
        {
            **{
                name: [{"role": datasets.Value("string"), "content": datasets.Value("string")}]
                for name in rows[0]
                if name not in ("images", "split")
            },
            "images": datasets.List(datasets.Image()),
            "split": datasets.Value("string"),
        }
    )
    return datasets.Dataset.from_list(rows, features=features)


def theirs(method: str, checkpoint: Path, rows: Path, folder: Path, micro: int) -> dict[str, list[float]]:
    script, out = ROOT / "benchmarks/sft_trl.py", folder / "theirs.json"
    command = [PYTHON, script, method, checkpoint, rows, out, json.dumps(OPTIONS | {"micro": micro})]
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "TRL_EXPERIMENTAL_SILENCE": "1"}
    done = subprocess.run([str(each) for each in command], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, list[float]] = json.loads(out.read_text())
    return result


@pytest.mark.parametrize(("method", "micro"), [("sft", 8), ("sft", 4), ("dpo", 8)])
def test_loss_gradient_norm_and_margins_equal_those_of_trl(method, micro, tmp_path):
    checkpoint = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", 0)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    table = rows_of(method)
    table.save_to_disk(tmp_path / "ours")
    in_our_order(table, ROWS_PER_STEP).save_to_disk(tmp_path / "theirs")
    expected = theirs(method, checkpoint, tmp_path / "theirs", tmp_path, micro)

    machine = make_machine(store=tmp_path / "store", threads=2, loader_workers=0)
    model = model_settings(source=str(checkpoint))
    source = {
        "source": str(tmp_path / "ours"),
        "images": ("images",),
        "split": {"by": "column"},
        "on_bad_row": "refuse",
    }
    pairs = PairColumns() if method == "dpo" else None
    data = ConversationsStageSettings(model=model, data=ConversationSettings.model_validate(source | {"pairs": pairs}))
    inputs = {"model": run_stage("model", model, {}, machine)}
    inputs["conversations"] = run_stage("conversations", data, inputs, machine)
    for packing in (False, True):
        trainer = SupervisedSettings(
            learning_rate=OPTIONS["learning_rate"],
            adam_epsilon=OPTIONS["epsilon"],
            max_sequence_tokens=4096,
            samples_per_step=ROWS_PER_STEP,
            packing=packing,
        )
        dpo = DPOSettings(beta=BETA) if method == "dpo" else None
        made = run_stage("sft", SupervisedStageSettings(model=model, trainer=trainer, dpo=dpo), inputs, machine)
        history = json.loads((made.path / "history.json").read_text())[1:]
        assert len(history) == len(expected["norm"]) == ROWS // ROWS_PER_STEP
        for step, row in enumerate(history):
            assert row["loss"] == pytest.approx(expected["loss"][step], rel=2e-6)
            assert row["grad_norm"] == pytest.approx(expected["norm"][step], rel=2e-5)
            if method == "dpo":
                assert row["reward_margin"] == pytest.approx(expected["margin"][step], rel=1e-4, abs=1e-6)
