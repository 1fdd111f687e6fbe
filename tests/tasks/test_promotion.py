"""The candidate (`models:/NAME@candidate`): its files load in other programs, and runs find its artifact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from mlflow.utils.validation import _validate_model_name

from armature.components.artifacts.manifest import write_manifest
from armature.components.artifacts.store import ArtifactStore
from armature.components.contracts.stages import Artifact
from armature.components.models.tiny import SMALL, make_tiny_checkpoint
from armature.tasks.promotion import _model_name
from tests.builders import make_machine
from tests.hostile_names import EVERY_CHARACTER, HOSTILE_NAMES
from tests.refusals import refused
from tests.vlm.conftest import model_settings

FINGERPRINT = "0" * 20


@pytest.fixture
def trained(tmp_path) -> Artifact:
    """The artifact of a training with a checkpoint, in a local and in a remote store."""

    def fill(folder: Path) -> None:
        make_tiny_checkpoint("qwen2-vl", folder / "checkpoint", 0, SMALL)
        write_manifest(folder, kind="train-vlm", kind_version=1, rows={}, drops={}, inputs={}, settings={})

    store = ArtifactStore(tmp_path / "store", str(tmp_path / "remote"))
    return store.write("train-vlm", FINGERPRINT, fill)


def fill_with_another(folder: Path) -> None:
    """Fill an artifact's folder with other contents, as a training on another machine would."""
    (folder / "weights").write_text("others")
    write_manifest(folder, kind="train-vlm", kind_version=1, rows={}, drops={}, inputs={}, settings={})


def log_probs(folder: Path) -> torch.Tensor:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.arange(5, 37)[None]
    with torch.no_grad():
        scores = model(input_ids=ids).logits.log_softmax(-1)
    return scores[:, :-1].gather(-1, ids[:, 1:, None])


def test_candidate_files_are_hard_links_that_load_elsewhere(trained, tracking, tmp_path):
    import mlflow

    from armature.tasks.checkpoints import checkpoint_artifact
    from armature.tasks.promotion import promote
    from armature.tasks.tracking import open_run

    run = open_run("train-vlm", "a run", {})
    name = promote(run.log_model("train-vlm", trained, "output"), "train-vlm.tiny", trained)
    assert name == "models:/train-vlm.tiny@candidate"
    assert promote(run.log_model("train-vlm", trained, "output"), "train-vlm.tiny", trained) == name
    folder = Path(mlflow.artifacts.download_artifacts(name))
    weights = trained.path / "checkpoint/model.safetensors"
    assert (folder / weights.name).samefile(weights)
    assert {each.name for each in weights.parent.iterdir()} < {each.name for each in folder.iterdir()}
    assert torch.equal(log_probs(folder), log_probs(weights.parent))
    copied = Path(mlflow.artifacts.download_artifacts(name, dst_path=str(tmp_path / "elsewhere")))
    assert (copied / weights.name).read_bytes() == weights.read_bytes()

    here = make_machine(store=tmp_path / "store")
    assert checkpoint_artifact(name, model_settings(), here).path == trained.path
    shutil.move(tmp_path / "store", tmp_path / "gone")
    with refused("checkpoint_not_here", trained.path, f"mlflow artifacts download -u {name}"):
        checkpoint_artifact(name, model_settings(), here)
    other = ArtifactStore(tmp_path / "store").write("train-vlm", FINGERPRINT, fill_with_another)
    assert other.path == trained.path and other.digest != trained.digest
    with refused("checkpoint_not_here", name):
        checkpoint_artifact(name, model_settings(), here)
    another = make_machine(store=tmp_path / "another", remote_store=tmp_path / "remote")
    result = checkpoint_artifact(name, model_settings(), another)
    assert result.digest == trained.digest and result.path.is_relative_to(tmp_path / "another")


@pytest.mark.parametrize("deployment", [*HOSTILE_NAMES, EVERY_CHARACTER])
def test_any_recipe_name_becomes_a_model_name(deployment):
    name = _model_name(f"train-vlm.{deployment}")
    _validate_model_name(name)
    assert not set(name) & set("/:@'\"%?#`\n")
