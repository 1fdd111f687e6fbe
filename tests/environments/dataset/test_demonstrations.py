"""A warm start on a table: its answers, played through the environment with the prompts of a real processor."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from armature.components.artifacts.images import ImageStore
from armature.components.contracts.machine import Machine
from armature.components.models.load import load_processor
from armature.components.models.tiny import make_tiny_checkpoint
from armature.components.sft.demonstrate import demonstrate, expert
from armature.components.sft.prompts import PromptWriter
from tests.vlm.conftest import model_settings

from .tables import environment_of, rows_of, write_images, write_jsonl

COUNT = 6


@pytest.mark.parametrize("form", ["prompt", "conversation"])
def test_answers_are_demonstrated_after_the_prompt_of_the_row(form: str, tmp_path: Path) -> None:
    rows = rows_of(COUNT)
    write_images(tmp_path, rows)
    for row in rows:
        asked = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": row["question"]}]}
        unsure = [{"role": "assistant", "content": "Again?"}, {"role": "user", "content": "Yes."}]
        row["chat"] = [{"role": "system", "content": "Be brief."}, asked, *unsure]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    how = {"prompt": "", "conversation": "chat"} if form == "conversation" else {"system": "Be brief."}
    environment = environment_of({"source": str(tmp_path / "rows.jsonl")}, split={"by": "column"}, **how)
    tasks = [*environment.tasks("train"), *environment.tasks("heldout")]
    model = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", 0)
    processor = load_processor(model, model_settings())
    images = ImageStore(tmp_path / "images-of-rollouts")
    writer, machine = PromptWriter(processor), Machine(max_concurrent=2)
    outputs = asyncio.run(demonstrate(expert(environment), tasks, 1.0, writer, images, machine, lambda done: None))
    assert outputs.failures == () and len(outputs.trajectories) == COUNT
    for task, trajectory in zip(tasks, outputs.trajectories, strict=True):
        row = rows[task.payload["row"]]
        (turn,) = trajectory.turns
        prompt = processor.tokenizer.decode(turn.prompt_token_ids, skip_special_tokens=True)
        later = ["assistant", "Again?", "user", "Yes."] if form == "conversation" else []
        assert prompt.split("\n") == ["system", "Be brief.", "user", row["question"], *later, "assistant", ""]
        assert turn.completion == row["answer"] and turn.reward == 1.0
        assert images.read(turn.images[0]) == (tmp_path / row["image"]).read_bytes()
        roles = [message["role"] for message in json.loads(turn.messages)]
        assert roles == ["system", "user", *(["assistant", "user"] if later else [])]
