"""Somebody writes Python: a script for TRL's GRPOTrainer, with a reward and a dataset, and a notebook."""

from __future__ import annotations

import base64
import io
import json
import re
from html import escape
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from PIL import Image

from tests.browser import NEEDS_CHROMIUM
from tests.first_hour.conftest import Newcomer, draw_dice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *NEEDS_CHROMIUM]

SCRIPT = """\
from datasets import load_dataset
from armature import MultimodalGRPOTrainer, MultimodalRLConfig

def right_number(completions, spots, **kwargs):
    return [float(completion == answer) for completion, answer in zip(completions, spots)]

dice = load_dataset("imagefolder", data_dir="dice", split="train")
config = MultimodalRLConfig(max_steps=20, learning_rate=1e-3, max_tokens=4, rollouts_per_step=256, micro_batch_size=256)
trainer = MultimodalGRPOTrainer(
    "tiny", config=config, reward_funcs=right_number, train_dataset=dice, eval_fraction=0.2, server="auto"
)
result = trainer.train()
trainer.save_model("dice-model")
print("accuracy", result["heldout/accuracy"])
"""

CELLS = (
    """\
from pathlib import Path
from datasets import Dataset, Image
from armature import MultimodalGRPOTrainer, MultimodalRLConfig
files = sorted(Path("dice").glob("*.png"))
spots = [int(file.stem.split("-")[1]) for file in files]
dice = Dataset.from_dict({"image": [str(file) for file in files], "spots": spots}).cast_column("image", Image())
dice[0]["image"]
""",
    """\
def near(completion, row):
    guess = completion.strip()
    return 1 - abs(int(guess) - row["spots"]) / 5 if guess in set("123456") else 0.0
near("3", dice[3])
""",
    """\
config = MultimodalRLConfig(max_steps=15, learning_rate=1e-3, max_tokens=4, rollouts_per_step=256, micro_batch_size=256)
trainer = MultimodalGRPOTrainer(
    "tiny", config=config, reward_funcs=near, train_dataset=dice, eval_fraction=0.2, prompt="How many spots?"
)
result = trainer.train()
""",
    """\
import pandas
pandas.DataFrame(result.history)[["step", "reward", "heldout/reward"]]
""",
)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory) -> Path:
    """A tiny model that answers with a number from 1 to 6, but guesses which. With a network, a newcomer names one of
    the hub."""
    from armature.components.configuration import load_recipe
    from armature.components.models.tiny import make_tiny_checkpoint

    tiny = load_recipe("train-vlm/colors").sections["model"].tiny
    answers = tiny.format.model_copy(update={"answers": tuple("123456")})
    folder = tmp_path_factory.mktemp("model") / "tiny"
    return make_tiny_checkpoint("qwen2-vl", folder, tiny.seed, tiny.model_copy(update={"format": answers}))


def test_script_from_trl_learns_dice(newcomer: Newcomer, tiny_model: Path) -> None:
    (newcomer.folder / "tiny").symlink_to(tiny_model)
    dice = draw_dice(newcomer.folder / "dice", 240)
    rows = [{"file_name": file.name, "prompt": "How many spots?", "spots": str(number)} for file, number in dice]
    (newcomer.folder / "dice/metadata.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    newcomer.writes("train.py", SCRIPT)
    done = newcomer.types("train.py")

    accuracy = re.search(r"^accuracy ([\d.]+)$", done.text, re.MULTILINE)
    history = [json.loads(line) for line in (newcomer.folder / "outputs/history.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["heldout/accuracy"] for row in history if "heldout/accuracy" in row}
    assert accuracy is not None and float(accuracy[1]) == measured[20] > measured[0] + 0.2
    assert [row["step"] for row in history if "reward" in row] == list(range(1, 21))
    weights = [newcomer.folder / folder / "model.safetensors" for folder in ("dice-model", "outputs/final")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    bars = [line for line in done.lines if "/20 [" in line]
    assert len(bars) == 1, bars
    assert newcomer.lines <= 14


def as_page(cells: list[dict[str, Any]]) -> str:
    """Return a page that shows the notebook as a person sees it, for the screenshot."""
    parts = []
    for cell in cells:
        parts.append(f"<pre style='background:#f2f2f2'>{escape(''.join(cell['source']))}</pre>")
        for output in cell["outputs"]:
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                parts.append(f"<img src='data:image/png;base64,{data['image/png']}'>")
            else:
                parts.append(data.get("text/html") or f"<pre>{escape(data['text/plain'])}</pre>")
    return "\n".join(parts)


@pytest.mark.long
def test_notebook_trains_with_reward_of_a_cell_and_shows_images(newcomer: Newcomer, tiny_model: Path) -> None:
    (newcomer.folder / "tiny").symlink_to(tiny_model)
    for file, number in draw_dice(newcomer.folder / "dice", 240):
        file.rename(file.with_stem(f"{file.stem}-{number}"))
    for source in CELLS:
        newcomer.lines += len(source.splitlines())
    notebook = new_notebook(cells=[new_code_cell(source) for source in CELLS])
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(newcomer.folder)}})
    client.execute(env=newcomer.variables)
    first, graded, trained, table = [cell["outputs"] for cell in notebook["cells"]]
    with newcomer.opens("about:blank") as page:
        page.set_content(as_page(notebook["cells"]))
        newcomer.saves(page, "notebook", whole=True)
    image = Image.open(io.BytesIO(base64.b64decode(first[-1]["data"]["image/png"])))
    with Image.open(newcomer.folder / "dice/000-1.png") as drawn:
        assert image.size == (56, 56) and image.tobytes() == drawn.convert(image.mode).tobytes()
    assert float(graded[-1]["data"]["text/plain"]) == pytest.approx(0.8)
    progress = "".join(output.get("text", "") for output in trained)
    assert "15/15" in progress
    assert "text/html" in table[-1]["data"]
    history = [json.loads(line) for line in (newcomer.folder / "outputs/history.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["heldout/reward"] for row in history if "heldout/reward" in row}
    assert measured[15] > measured[0] + 0.05
    assert (newcomer.folder / "outputs/final/model.safetensors").is_file()
    assert newcomer.lines <= 20
