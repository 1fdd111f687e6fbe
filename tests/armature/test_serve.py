"""`armature serve`: a real server that a pool joins; it goes when it is told to."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from armature.components.inference.pool import ServerPool
from armature.components.inference.settings import SamplingSettings, ServerSettings
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from tests.builders import make_machine

ROOT = Path(__file__).resolve().parents[2]
KEY = "the-key-of-the-test"


def notebook_cell(tag: str) -> str:
    """Return the text of the cell in examples/trainer.ipynb that has this tag."""
    cells = json.loads((ROOT / "examples/trainer.ipynb").read_text())["cells"]
    (result,) = (cell for cell in cells if tag in cell["metadata"].get("tags", ()))
    return "".join(result["source"])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_trainer_joins_a_served_model(tmp_path, monkeypatch):
    """It is started as examples/trainer.ipynb starts it."""
    model = make_tiny_checkpoint("qwen2-vl", tmp_path / "tiny-colors", 0, SMALL)
    (tmp_path / ".venv-vllm").symlink_to(ROOT / ".venv-vllm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook: dict[str, Any] = {"port": None}
    exec(notebook_cell("server"), notebook)
    program, url = notebook["server"], notebook["url"]
    try:
        output = [program.stdout.readline().strip() for _ in range(4)]
        assert output[0].startswith("export VLLM_API_KEY=") and KEY not in output[0]
        assert f"--machine 'servers.endpoints=[\"{url}\"]'" in output[1]
        assert httpx.get(f"{url}/v1/models", trust_env=False).status_code == 401
        assert asyncio.run(sampled(model, url, tmp_path)) == 2
    finally:
        exec(notebook_cell("stop"), notebook)
    assert program.returncode == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


async def sampled(model: Path, url: str, folder: Path) -> int:
    """Sample a completion from a pool that joins the server at `url`, and return its number of tokens."""
    settings = ServerSettings(max_model_len=512, max_images_per_prompt=4, dtype="float32")
    async with ServerPool(model, settings, make_machine(endpoints=(url,)), folder / "logs") as pool:
        messages = [{"role": "user", "content": "What color?"}]
        completion = await pool.complete(messages, SamplingSettings(max_tokens=2), seed=0)
        return len(completion.token_ids)
