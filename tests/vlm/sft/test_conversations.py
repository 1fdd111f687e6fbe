"""The stages `conversations` and `sft` on tables in every form that users have, with the recipe of docs/sft.md."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file

from armature.check import check_recipe
from armature.components.artifacts.images import encode_png
from armature.components.artifacts.manifest import read_manifest
from armature.components.configuration import load_recipe
from armature.components.configuration.stages import STAGES, run_stage
from armature.components.machine.project import project
from armature.components.models.load import load_model
from armature.components.models.source import ADAPTER, locate
from armature.components.rollouts.table import read_rollouts
from tests.refusals import refused

PAGE = (Path(__file__).resolve().parents[3] / "docs/sft.md").read_text()
COLORS = {"red": (220, 40, 40), "blue": (40, 70, 220)}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def png(number: int) -> tuple[str, bytes]:
    """Return name and image of a color; the images of all numbers differ."""
    color = list(COLORS)[number % 2]
    red, green, blue = COLORS[color]
    return color, encode_png(Image.new("RGB", (56, 56), (red - number % 16, green, blue - number // 16))).data


CHATS, PAIRS = 0, 1
"""Numbers of the row and the recipe of each kind on the page."""


def chat(image: Any, answer: str) -> list[dict[str, Any]]:
    """Return the messages of the page's row with another image and answer."""
    messages: list[dict[str, Any]] = json.loads(blocks("json")[CHATS])["messages"]
    messages[0]["content"][0] = {"type": "image", **image}
    messages[1]["content"] = answer
    return messages


def as_json_lines(folder: Path) -> str:
    (folder / "images").mkdir()
    rows = []
    for number in range(32):
        color, data = png(number)
        (folder / f"images/{number}.png").write_bytes(data)
        rows.append({"messages": chat({"path": f"images/{number}.png"}, color)})
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "chats.jsonl"


def columns() -> dict[str, list[Any]]:
    """Return columns of rows whose images are in a column of their own."""
    shown = [png(number) for number in range(32)]
    chats = [chat({}, color) for color, _ in shown]
    for _, answer in chats:  # a column has one type
        answer["content"] = [{"type": "text", "text": answer["content"]}]
    return {"messages": chats, "image": [{"bytes": data} for _, data in shown]}


def as_parquet(folder: Path) -> str:
    pd.DataFrame(columns()).to_parquet(folder / "chats.parquet")
    return "chats.parquet"


def as_saved_dataset(folder: Path) -> str:
    made = datasets.Dataset.from_dict(columns()).cast_column("image", datasets.Image())
    made.save_to_disk(str(folder / "saved"))
    return "saved"


def as_copy_of_a_hub_dataset(folder: Path) -> str:
    """Write a folder as a dataset's repository on the hub has it: data/, and a README that describes the columns."""
    made = datasets.Dataset.from_dict(columns()).cast_column("image", datasets.Image())
    (folder / "repository/data").mkdir(parents=True)
    made.to_parquet(folder / "repository/data/train-00000-of-00001.parquet")
    (folder / "repository/README.md").write_text("---\nconfigs:\n- config_name: default\n---\n")
    assert len(datasets.load_dataset(str(folder / "repository"), split="train")) == 32
    return "repository"


def as_function(folder: Path) -> str:
    (folder / "own_chats.py").write_text(
        "import datasets\ndef rows():\n"
        f"    made = datasets.load_from_disk({str(folder / as_saved_dataset(folder))!r})\n    return made\n"
    )
    return "own_chats:rows"


def made(folder: Path, *overrides: str, kind: int = CHATS) -> Any:
    """Return the recipe of the page in `folder`, and a function that runs one of its stages."""
    (folder / "recipe.toml").write_text(blocks("toml")[kind])
    recipe = load_recipe(
        folder / "recipe.toml", [*overrides, f"machine.store={folder / 'store'}", "model.tiny.format.steps=2"]
    )

    def run(name: str, **inputs: Any) -> Any:
        with project(folder):
            return run_stage(name, recipe.settings_for(STAGES[name].settings), inputs, recipe.machine)

    return recipe, run


@pytest.mark.parametrize(
    "form",
    [as_json_lines, as_parquet, as_saved_dataset, as_copy_of_a_hub_dataset, as_function],
    ids=lambda each: each.__name__,
)
def test_every_form_of_a_table_gives_the_same_turns(form, tmp_path):
    source = form(tmp_path)
    images = [] if form is as_json_lines else ['data.images=["image"]']
    _, run = made(tmp_path, f"data.source={source}", *images)
    data = run("conversations", model=run("model"))
    manifest = read_manifest(data.path)
    assert sum(manifest.rows.values()) == 32 and all(manifest.rows.values()) and not manifest.drops
    trajectories = read_rollouts(data.path).trajectories
    assert [each.turns[0].completion for each in trajectories] == list(COLORS) * 16
    assert len({each.turns[0].images[0].sha256 for each in trajectories}) == 32
    assert {len(each.turns[0].prompt_token_ids) for each in trajectories} == {
        len(trajectories[0].turns[0].prompt_token_ids)
    }


def test_bad_rows_are_counted_and_refused_on_demand(tmp_path):
    as_json_lines(tmp_path)
    bad = [
        {"messages": chat({"path": "images/99.png"}, "red")},
        {"messages": chat({"path": "../../secret.png"}, "red")},
        {"messages": chat({"image": "data:image/png;base64,iVBORw=="}, "red")},
        {"messages": chat({"path": "images/0.png"}, "red<|im_end|>")},
        {"messages": []},
    ]
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in bad)
        file.write("{not json\n")
    _, run = made(tmp_path)
    data = run("conversations", model=run("model"))
    counts = {"no_image": 1, "bad_path": 1, "bad_image": 1, "reserved_token": 1, "bad_conversation": 1, "unreadable": 1}
    assert read_manifest(data.path).drops == counts
    assert sorted(each.reason for each in read_rollouts(data.path).failures) == sorted(counts)
    _, run = made(tmp_path, "data.on_bad_row=refuse")
    with refused("rows_unusable", "data.on_bad_row"):
        run("conversations", model=run("model"))


def test_table_without_a_usable_row_is_an_error(tmp_path):
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    _, run = made(tmp_path)
    with refused("no_conversation_usable", "no_answer"):
        run("conversations", model=run("model"))


@pytest.mark.slow
def test_recipe_of_the_page_is_checked_and_learns(tmp_path, capsys):
    as_json_lines(tmp_path)
    recipe, run = made(tmp_path, "trainer.epochs=4", "trainer.samples_per_step=8", "trainer.packing=true")
    check_recipe(recipe, configuration_only=False)
    assert re.search(r"⟦(red|blue)<\|im_end\|>⟧", capsys.readouterr().out)
    model = run("model")
    trained = run("sft", conversations=run("conversations", model=model), model=model)
    numbers = json.loads((trained.path / "metrics.json").read_text())
    assert numbers["heldout_loss"] < numbers["heldout_loss_before"]
    assert numbers["heldout_token_accuracy"] > numbers["heldout_token_accuracy_before"]
    assert locate(trained.path) == trained.path / "checkpoint"
    assert (trained.path / "report.html").is_file()


def pairs_as_json_lines(folder: Path, rows: int) -> str:
    """Write pairs whose chosen answer is the image's color, and three rows that are not pairs."""
    as_json_lines(folder)
    lines = []
    for number in range(rows):
        row = json.loads(blocks("json")[PAIRS])
        right, wrong = (list(COLORS)[at] for at in (number % 2, 1 - number % 2))
        row["prompt"][0]["content"][0] = {"type": "image", "path": f"images/{number}.png"}
        row["chosen"][0]["content"], row["rejected"][0]["content"] = right, wrong
        lines.append(row)
    same = {**row, "rejected": row["chosen"]}
    reserved = {**row, "rejected": [{"role": "assistant", "content": "<|im_end|>"}]}
    lines += [same, reserved, {**row, "prompt": []}]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    return "pairs.jsonl"


@pytest.mark.slow
def test_recipe_of_pairs_on_the_page_learns_by_adapters_alone(tmp_path, capsys):
    pairs_as_json_lines(tmp_path, 32)
    settings = ["trainer.epochs=6", "trainer.samples_per_step=8", "trainer.packing=true", "trainer.learning_rate=5e-3"]
    lora = 'model.lora={rank=8,alpha=16,targets=["q_proj","v_proj"]}'
    recipe, run = made(tmp_path, *settings, lora, kind=PAIRS)
    check_recipe(recipe, configuration_only=False)
    shown = re.findall(r"⟦(red|blue)<\|im_end\|>⟧", capsys.readouterr().out)
    assert sorted(shown) == ["blue", "red"]
    model = run("model")
    data = run("conversations", model=model)
    manifest = read_manifest(data.path)
    assert manifest.drops == {"equal_answers": 1, "reserved_token": 1, "no_prompt": 1}
    assert sum(manifest.rows.values()) == 32 and all(manifest.rows.values())
    trained = run("sft", conversations=data, model=model)
    numbers = json.loads((trained.path / "metrics.json").read_text())
    assert numbers["heldout_loss_before"] == pytest.approx(0.693147, abs=1e-5)
    assert numbers["heldout_loss"] < 0.6 and numbers["heldout_pair_accuracy"] > 0.9
    before, after = (load_file(locate(each.path) / "model.safetensors") for each in (model, trained))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert before.keys() == after.keys() and changed
    assert all(re.search(r"\.(q|v)_proj\.", name) for name in changed)
    whole = recipe.sections["model"].model_copy(update={"lora": None})
    adapters = PeftModel.from_pretrained(load_model(model.path, whole), locate(trained.path) / ADAPTER)
    merged = adapters.merge_and_unload().state_dict()
    for name, weights in load_model(trained.path, whole).state_dict().items():
        torch.testing.assert_close(merged[name], weights, rtol=0, atol=1e-6)
