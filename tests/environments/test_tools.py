"""Tools in processes: a call that hangs, dies or misbehaves is an error for the model, and the next call works."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from armature import load_recipe
from armature.components.artifacts.images import decode, encode_png
from armature.components.contracts.tool_calls import ToolCall, ToolResult
from armature.components.environments.dot import DotSettings, dotted_image
from armature.components.environments.make import make_environment
from armature.components.environments.settings import EnvironmentSettings
from armature.components.environments.tools.box import ToolBox
from armature.components.environments.tools.standard import zoom
from armature.components.environments.tools.tool import Tool
from armature.components.inference.tool_calls import ToolFormat
from armature.components.machine.project import project
from tests.refusals import refused
from tests.size import ROOT

MODULE = '''
import asyncio, os, time
from PIL import Image
from armature import ToolError

def misbehave(how: str, image: Image.Image):
    """Misbehave.

    Args:
        how: The way.
        image: The image.
    """
    match how:
        case "hang": time.sleep(1000)
        case "spin":
            while True: pass
        case "die": os._exit(3)
        case "raise": raise KeyError("why")
        case "tell": raise ToolError("no such page")
        case "exit": raise SystemExit(1)
        case "memory": return "x" * 10**10
        case "text": return "x" * 10**6
        case "object": return object()
        case "half": return "\\ud800"
        case "large": return Image.new("L", (5000, 5000))
        case "thin": return Image.new("RGB", (1000, 1))
        case "mode": return Image.new("F", (9, 9))
        case "many": return [Image.new("L", (9, 9))] * 17
        case "fork":
            for _ in range(3):
                if os.fork() == 0:
                    time.sleep(1000)
            return "forked"
        case "several": return [image, "and", image.convert("LA")]
        case "json": return {"a": [1, None]}
    return image.size

async def later(number: int = 1) -> str:
    """Wait.

    Args:
        number: A number.
    """
    await asyncio.sleep(0)
    return str(number)
'''
IMAGES = [encode_png(Image.new("RGB", (8, 6), "red"))]


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolBox]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "misbehaving_tools.py").write_text(MODULE)
    with project(folder):
        made = ToolBox(["misbehaving_tools:misbehave", "misbehaving_tools:later", "python"], timeout=60)
    yield made
    made.close()


def call(box: ToolBox, name: str, **arguments: Any) -> ToolResult:
    return asyncio.run(box.call(ToolCall(name, arguments), IMAGES))


def processes() -> int:
    return len(psutil.Process().children(recursive=True))


def test_faults_are_errors_and_the_next_call_works(box: ToolBox) -> None:
    call(box, "later")
    before = processes()
    expected = {
        "raise": "raised",
        "tell": "error",
        "object": "result",
        "half": "result",
        "text": "result",
        "memory": "raised",
        "large": "result",
        "thin": "result",
        "mode": "result",
        "many": "result",
        "die": "died",
        "exit": "died",
        "fork": "ok",
    }
    assert {how: call(box, "misbehave", how=how).status for how in expected} == expected
    assert processes() == before
    assert "no such page" in str(call(box, "misbehave", how="tell").content)
    assert call(box, "misbehave", how="size").content == ("[8, 6]",)


def test_results_are_texts_images_and_json(box: ToolBox) -> None:
    first, text, second = call(box, "misbehave", how="several").content
    assert (decode(first).size, text, decode(second).mode) == ((8, 6), "and", "RGB")  # type: ignore[arg-type]
    assert call(box, "misbehave", how="json").content == ('{"a": [1, null]}',)
    assert call(box, "later", number="7").content == ("7",)
    assert call(box, "later", other=1).status == "arguments"


def wait() -> str:
    """Wait."""
    time.sleep(3)
    return ""


def test_calls_that_hang_end_in_time(box: ToolBox, monkeypatch: pytest.MonkeyPatch) -> None:
    here = ToolBox(functions=[wait], timeout=0.2)
    assert call(here, "wait").status == "timeout"
    call(box, "later")  # the process has started
    monkeypatch.setattr(box, "_timeout", 1.0)
    assert [call(box, "misbehave", how=how).status for how in ("hang", "spin")] == ["timeout", "timeout"]
    monkeypatch.undo()
    assert call(box, "later").content == ("1",)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("import math, numpy\nprint(math.factorial(5), numpy.arange(3).sum())", "120 3"),
        ("open('/etc/hostname').read()", "PermissionError"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.kill(1, 9)", "PermissionError"),
        ("import os; os.execv('/bin/true', ['true'])", "PermissionError"),
        ("print(1/0)", "ZeroDivisionError"),
        ("print('x' * 10**6)", "cut off"),
        ("x = [0] * 10**10", "MemoryError"),
    ],
)
def test_python_computes_and_nothing_else(box: ToolBox, code: str, shown: str) -> None:
    assert shown in str(call(box, "python", code=code).content)


def without_type(box) -> str:  # type: ignore[no-untyped-def]
    """Do it."""
    return ""


def without_description(box: list[int]) -> str:
    """Do it."""
    return ""


@pytest.mark.parametrize("function", [without_type, without_description, lambda: "", print])
def test_function_without_schema_is_refused(function: Any) -> None:
    with refused("tool_schema_missing", "tools"):
        _ = Tool(function).schema


def test_rejects_equal_names_and_tools_of_a_mixture() -> None:
    with refused("tool_repeated", "tools"):
        ToolBox(["zoom", "zoom"])
    part = {"name": "colors", "train_tasks": 1, "heldout_tasks": 1}
    parts = {"a": part, "b": part | {"tools": ("zoom",)}}
    with refused("tools_of_mixture", "environment.tools"):
        make_environment(EnvironmentSettings(name="mixture", args={"parts": parts}, tools=("zoom",)))
    environment: Any = make_environment(EnvironmentSettings(name="mixture", args={"parts": parts}))
    offered = {name: hasattr(part.environment, "tools") for name, part in environment.parts.items()}
    assert offered == {"a": False, "b": True}
    environment.close()


def test_function_of_the_docs_is_a_tool() -> None:
    page = (ROOT / "docs/tools.md").read_text()
    names: dict[str, Any] = {"__name__": "page"}
    exec(page.partition("```python\n")[2].partition("```")[0], names)
    here = ToolBox(functions=[names["enlarge"]])
    (image,) = call(here, "enlarge", left=0, top=0, size=4).content
    assert decode(image).size == (448, 448)  # type: ignore[arg-type]
    assert call(here, "enlarge", left=9, top=0).status == "error"
    assert here.schemas[0]["function"]["parameters"]["required"] == ["left", "top"]


def test_recipe_teaches_the_system_prompt_and_the_model_cannot_see_the_dot() -> None:
    recipe = load_recipe("train-vlm/zoom-tiny")
    model, environment = recipe.sections["model"], recipe.sections["environment"]
    box = ToolBox(environment.tools)
    assert model.tiny.format.system == ToolFormat().instruction(box.schemas)
    box.close()
    settings = DotSettings.model_validate(environment.args)
    side, where = model.tiny.image_side, [*settings.dot, *(each + 1 for each in settings.dot)]
    images = [decode(dotted_image(color, seed, settings)) for seed, color in enumerate(settings.names)]
    shrunk = [np.asarray(image.resize((side, side), Image.Resampling.BICUBIC), np.int16) for image in images]
    assert max(np.abs(image - 128).max() for image in shrunk) <= 3  # of 255 levels
    assert max((image != 128).any(2).sum() for image in shrunk) <= 2  # of 28,224 pixels
    assert len({zoom(image, where).resize((side, side)).tobytes() for image in images}) == len(settings.names)
