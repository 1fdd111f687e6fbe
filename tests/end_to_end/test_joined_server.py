"""A real server that somebody else started: what does not fit is refused with the reason, what fits is trained on."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from armature.check import check_recipe
from armature.components.configuration import Recipe, build_recipe, load_recipe
from armature.components.contracts.errors import MismatchError
from armature.components.inference.pool import ServerPool
from tests.end_to_end.conftest import make

NAME = "train-vlm/colors"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def recipe(store: Path, *overrides: str) -> Recipe:
    common = ("model.tiny.format.steps=20", "preflight.groups=2", f'machine.store="{store}"')
    return load_recipe(NAME, (*common, *overrides))


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("check") / "store"


@pytest.fixture
def server(store, joined_url) -> str:
    """The URL of the shared server, after the checkpoint of the recipe was loaded into it."""
    ours = recipe(store, f'machine.servers.endpoints=["{joined_url}"]')
    model = make(ours, "model")

    async def give_weights() -> None:
        async with ServerPool(model.path, ours.sections["inference"], ours.sections["machine"], store.parent / "logs"):
            pass

    asyncio.run(give_weights())
    return joined_url


def test_preflight_accepts_the_right_server(store, server, capsys):
    check_recipe(recipe(store, f'machine.servers.endpoints=["{server}"]'), configuration_only=False)
    printed = capsys.readouterr()
    output = printed.out + printed.err
    assert "ready to train" in output
    assert "trainer needs" in output and "mismatch KL" in output


def test_preflight_rejects_another_checkpoint(store, server):
    other = recipe(store, f'machine.servers.endpoints=["{server}"]', "model.tiny.seed=11")
    with pytest.raises(MismatchError) as caught:
        check_recipe(other, configuration_only=False)
    assert caught.value.where == "pre-flight"


def test_preflight_rejects_another_image_size(store, server, tmp_path):
    ours = recipe(store, f'machine.servers.endpoints=["{server}"]')
    model = make(ours, "model")
    folder = tmp_path / "larger-images"
    shutil.copytree(model.path, folder, ignore=shutil.ignore_patterns("manifest.json"))
    enlarge_images(folder)
    values: dict[str, Any] = ours.dump()
    values["model"] |= {"source": str(folder), "tiny": None}
    with pytest.raises(MismatchError) as caught:
        check_recipe(build_recipe(NAME, values, where="test"), configuration_only=False)
    assert "placeholder_mismatch" in caught.exconly()


def enlarge_images(folder: Path) -> None:
    """Let the processor scale every image to at least 112 x 112 pixels, four times the recipe's 56 x 56."""
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (folder / name).exists():
            document = json.loads((folder / name).read_text())
            for section in (document, document.get("image_processor", {})):
                if "size" in section:
                    section["size"]["shortest_edge"] = 112 * 112
                    section.pop("min_pixels", None)
            (folder / name).write_text(json.dumps(document))


def test_step_mismatch_above_the_bound_stops_the_run(store, server):
    """The trainer computes in 16 bits, the server in 32: little enough for the pre-flight, too much for this bound."""
    few = ("trainer.max_steps=2", "rollouts.groups_per_step=2", 'trainer.autocast="bf16"')
    ours = recipe(store, f'machine.servers.endpoints=["{server}"]', *few, "preflight.max_step_mismatch_kl=1e-9")
    inputs = {name: make(ours, name) for name in ("model", "tasks")}
    before = set((store / "workspaces").glob("train-vlm-*"))
    with pytest.raises(MismatchError) as caught:
        make(ours, "train-vlm", **inputs)
    assert caught.value.where == "preflight.max_step_mismatch_kl"
    (workspace,) = set((store / "workspaces").glob("train-vlm-*")) - before
    assert not list(workspace.glob("trainer/checkpoints/*"))
