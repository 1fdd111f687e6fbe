"""The stage `policy`: tiny policies and references to existing ones."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects

from armature.components.configuration.stages import TerminalEvents, ThreadUnits
from armature.components.contracts.digests import folder_digest
from armature.components.contracts.robots import RobotObservation
from armature.components.contracts.stages import StageContext
from armature.components.models.source import locate
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from armature.components.robots.policies.molmoact2.processing.batch import Example
from armature.components.robots.policies.norm_stats import RobotMetadata
from armature.components.robots.policies.settings import TinyPolicySettings
from armature.components.robots.policies.source import POLICY
from armature.components.robots.policies.stage import POLICY_STAGE
from tests.builders import make_machine
from tests.refusals import refused
from tests.robots.policies.molmoact2 import released

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TEXT = {"hidden_size": 32, "intermediate_size": 48, "layers": 2, "heads": 4, "key_value_heads": 2}
VISION = {"vision_hidden_size": 32, "vision_intermediate_size": 40, "vision_layers": 3, "vision_heads": 2}
EXPERT = {"expert_hidden_size": 24, "expert_heads": 2, "expert_mlp_ratio": 2.0, "time_embedding": 16}
LIMITS = {"image_side": 56, "max_action_dim": 8, "max_action_horizon": 6, "max_positions": 512, "action_tokens": 256}
TINY = TinyPolicySettings.model_validate(
    {"seed": 3, "corpus": ("pick up the black bowl and place it on the plate",), **TEXT, **VISION, **EXPERT, **LIMITS}
    | {"initializer_range": 0.05, "vision_initializer_range": 0.02}
)
SETTINGS = released.SETTINGS.model_copy(update={"checkpoint_path": None, "chunk_size": 6, "n_action_steps": 3})


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Path]:
    def run(**changes: Any) -> Path:
        out = tmp_path / f"out{len(list(tmp_path.iterdir()))}"
        out.mkdir()
        machine, places = make_machine(store=tmp_path / "store"), (tmp_path / "work", tmp_path / "images")
        context = StageContext(machine, TerminalEvents(), ThreadUnits(), *places, "0")
        POLICY_STAGE.run(SETTINGS.model_copy(update=changes), {}, out, context)
        return out

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return released.write_released(tmp_path_factory.mktemp("released") / "checkpoint")


def test_tiny_policy_is_deterministic(run: Callable[..., Path]) -> None:
    made = run(tiny=TINY)
    assert folder_digest(made) == folder_digest(run(tiny=TINY))
    assert folder_digest(made) != folder_digest(run(tiny=TINY.model_copy(update={"seed": 4})))
    assert locate(made, kind=POLICY) == made / "checkpoint"


def test_tiny_policy_has_the_released_layout(run: Callable[..., Path], folder: Path) -> None:
    made = run(tiny=TINY) / "checkpoint"
    ours, theirs = (json.loads((one / "config.json").read_text()) for one in (made, folder))
    assert theirs.keys() - ours.keys() == {"auto_map", "num_depth_codes", "a_field_of_tomorrow"}
    assert {file.name for file in made.iterdir()} >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    ids = json.loads((made / "tokenizer.json").read_text())["added_tokens"]
    places = {token["content"]: token["id"] for token in ids}
    assert [places[f"<action_{number}>"] - places["<action_0>"] for number in (1, 255)] == [1, 255]
    assert places["<im_start>"] == ours["text_config"]["vocab_size"] == places["<action_255>"] + 1


def test_tiny_policy_encodes_every_chunk_as_tokens(run: Callable[..., Path]) -> None:
    entry = released.norm_stats()["metadata_by_tag"]["kitchen"]
    settings = SETTINGS.model_copy(update={"action_mode": "both"})
    loaded = load_policy(run(tiny=TINY), settings, RobotMetadata.model_validate(entry))
    processor = loaded.processor()
    observation = RobotObservation(
        images=dict.fromkeys(released.CAMERAS, np.zeros((20, 30, 3), np.uint8)),
        state=np.zeros(8, np.float32),
        task="Pick up the black bowl.",
    )
    actions = np.random.default_rng(0).uniform(-1, 1, (6, 7))
    example: Example = processor.encode(observation, actions)
    assert example.input_ids.max() < loaded.config.text_config.vocab_size + 16
    assert example.pooling.shape == (2 * 4, 4)
    assert example.labels is not None
    decoded = processor.decode_tokens([number for number in example.labels.tolist() if number >= 0])
    assert decoded.actions is not None
    normalized = processor.action.normalize(actions.astype(np.float32), "")
    assert np.abs(decoded.actions - normalized).max() < 0.12  # half a step of each of 6 coefficients, at scale 10


def test_artifact_names_the_folder_and_the_norm_tag(run: Callable[..., Path], folder: Path) -> None:
    made = run(checkpoint_path=str(folder), norm_tag="kitchen")
    assert {file.name for file in made.iterdir()} == {"source.json", "policy.json"}
    loaded = load_policy(made)
    assert (loaded.settings.chunk_size, loaded.settings.image_keys) == (4, released.CAMERAS)
    direct = load_policy(folder, SETTINGS.model_copy(update={"norm_tag": "kitchen"}))
    assert loaded.parts.robot == direct.parts.robot
    state = direct.model.state_dict()
    assert all(torch.equal(one, state[name]) for name, one in loaded.model.state_dict().items())


def test_rejects_changed_weights_of_a_referenced_folder(run: Callable[..., Path], folder: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(folder, tmp_path / "mine")
    made = run(checkpoint_path=str(mine))
    content = bytearray((mine / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (mine / "model.safetensors").write_bytes(content)
    with refused("checkpoint_changed", mine, made):
        load_policy(made)


@pytest.mark.parametrize(
    ("changes", "code", "place"),
    [
        ({}, "policy_missing", "policy.checkpoint_path"),
        ({"checkpoint_path": "allenai/MolmoAct2"}, "revision_missing", "'allenai/MolmoAct2'"),
        ({"tiny": TINY, "path": "mine"}, "policy_ambiguous", "policy.path"),
        ({"tiny": TINY, "chunk_size": 4, "n_action_steps": 5}, "chunk_too_short", "policy.n_action_steps"),
    ],
    ids=["none", "no revision", "two", "more steps than predicted"],
)
def test_rejects_missing_or_ambiguous_policy(
    run: Callable[..., Path], changes: dict[str, Any], code: str, place: str
) -> None:
    with refused(code, place):
        run(**changes)


def test_rejects_unknown_norm_tag(run: Callable[..., Path], folder: Path) -> None:
    with refused("unknown_norm_tag", "'cellar'", "kitchen"):
        run(checkpoint_path=str(folder), norm_tag="cellar")


def test_no_code_is_downloaded_from_the_hub(
    run: Callable[..., Path], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub is a local folder here; its real client's function selects the files to download."""
    asked: list[set[str]] = []

    def snapshot(name: str, revision: str, allow_patterns: list[str]) -> str:
        assert (name, revision) == ("allenai/MolmoAct2", COMMIT)
        there = [file.name for file in folder.iterdir()]
        asked.append(set(filter_repo_objects(there, allow_patterns=allow_patterns)))
        target = tmp_path / "hub" / COMMIT
        target.mkdir(parents=True, exist_ok=True)
        for file in asked[-1]:
            shutil.copyfile(folder / file, target / file)
        return str(target)

    monkeypatch.setattr("armature.components.models.source.snapshot_download", snapshot)
    made = run(checkpoint_path="allenai/MolmoAct2", revision=COMMIT, norm_tag="kitchen")
    assert json.loads((made / "source.json").read_text())["commit"] == COMMIT
    assert load_policy(made).settings.chunk_size == 4
    fetched = set.union(*asked)
    assert fetched >= {"config.json", "model.safetensors", "norm_stats.json", "tokenizer.json", "chat_template.jinja"}
    assert not [file for file in fetched if file.endswith(".py")]
    assert any("model.safetensors" not in files for files in asked)  # loading only the parts downloads no weights


def test_stage_module_does_not_import_torch() -> None:
    code = "import sys; import armature.components.robots.policies.stage; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
