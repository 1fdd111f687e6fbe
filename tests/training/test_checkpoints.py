"""Training checkpoints: resuming bit for bit, refusing other models' and damaged checkpoints, and a full disk."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file

from armature.components.contracts.digests import folder_digest
from armature.components.models.adapters import model_inputs
from armature.components.models.load import load_model, load_processor
from armature.components.training.checkpoints import STATE_FILE, TENSORS, Checkpoints, identity
from armature.components.training.optimizer_state import STATE
from armature.components.training.ranks import Ranks
from armature.components.training.sharded_tensors import INDEX
from armature.components.vlm.learner import Learner
from armature.components.vlm.publish import Publisher
from tests.refusals import refused
from tests.vlm.conftest import LORA, Tiny, model_settings, step, trainer_settings

from .rewriting import rewrite


def make(tiny: Tiny, lora: Any = None, folder: Path | None = None, **changes: Any) -> tuple[Learner, dict[str, Any]]:
    settings = trainer_settings(**changes)
    torch.manual_seed(0)  # adapters are initialized randomly
    model = load_model(folder or tiny.folder, model_settings(lora=lora))
    who = identity(model, settings)
    return Learner(model, settings, temperature=1.0), who


def save(learner: Learner, folder: Path, state: dict[str, Any], who: dict[str, Any]) -> Path:
    """Save a checkpoint and wait until it is on the disk."""
    checkpoints = Checkpoints(folder, who, learner.ranks, learner.settings.keep_checkpoints)
    path = checkpoints.save(learner, state)
    checkpoints.wait()
    return path


def load(learner: Learner, path: Path, who: dict[str, Any]) -> dict[str, Any]:
    return Checkpoints(path.parent, who, learner.ranks, 2).load(learner, path)


def latest(folder: Path) -> Path | None:
    return Checkpoints(folder, {}, Ranks(), 2).newest


def train(learner: Learner, tiny: Tiny, *seeds: int) -> list[float]:
    return [step(learner, tiny, tiny.samples(4, seed=seed))["loss"] for seed in seeds]


@pytest.mark.parametrize(
    ("lora", "changes"), [(None, {}), (LORA, {}), (None, {"packing": True})], ids=["full", "lora", "packed"]
)
def test_resume_equals_uninterrupted_run(tiny: Tiny, tmp_path: Path, lora: Any, changes: Any) -> None:
    straight, who = make(tiny, lora, **changes)
    losses = train(straight, tiny, 1, 2, 3, 4)
    first, _ = make(tiny, lora, **changes)
    train(first, tiny, 1, 2)
    save(first, tmp_path, {"note": [1]}, who)
    second, who_again = make(tiny, lora, **changes)
    newest = latest(tmp_path)
    assert newest is not None
    assert load(second, newest, who_again) == {"note": [1]}
    assert second.steps_done == 2
    assert train(second, tiny, 3, 4) == losses[2:]
    for one, two in zip(straight.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(one, two)
        moments, resumed = straight.optimizer.state[one], second.optimizer.state[two]
        assert moments.keys() == resumed.keys()
        assert all(torch.equal(value, resumed[slot]) for slot, value in moments.items())


def test_resume_accepts_bf16_moments(tiny: Tiny, tmp_path: Path) -> None:
    """torch's AdamW keeps bf16 moments for bf16 weights. Compare with a learner whose moments were rounded in place."""
    rounded, who = make(tiny)
    train(rounded, tiny, 1)
    path = save(rounded, tmp_path, {}, who)
    rewrite(path, STATE, lambda state: {n: v.bfloat16() if "exp_avg" in n else v for n, v in state.items()})
    for state in rounded.optimizer.state.values():
        state.update({name: state[name].bfloat16().float() for name in ("exp_avg", "exp_avg_sq")})
    resumed, _ = make(tiny)
    load(resumed, path, who)
    assert train(resumed, tiny, 2, 3) == train(rounded, tiny, 2, 3)
    pairs = zip(rounded.policy.parameters(), resumed.policy.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


def test_load_restores_random_state(tiny: Tiny, tmp_path: Path) -> None:
    learner, who = make(tiny)
    path = save(learner, tmp_path, {}, who)
    expected = torch.rand(3)
    torch.rand(100)
    load(learner, path, who)
    assert torch.equal(torch.rand(3), expected)


def test_keeps_newest_checkpoints_and_ignores_incomplete_one(tiny: Tiny, tmp_path: Path) -> None:
    learner, who = make(tiny, keep_checkpoints=2)
    assert latest(tmp_path / "none") is None
    for learner.steps_done in (1, 2, 12):
        save(learner, tmp_path, {}, who)
    (tmp_path / ".new-step-000099").mkdir()
    assert sorted(p.name for p in tmp_path.glob("step-*")) == ["step-000002", "step-000012"]
    newest = latest(tmp_path)
    assert newest is not None
    assert newest.name == "step-000012"


def test_rejects_checkpoint_of_other_settings_model_or_base(tiny: Tiny, tmp_path: Path) -> None:
    learner, who = make(tiny, LORA)
    path = save(learner, tmp_path, {}, who)
    other, who_other = make(tiny, LORA, learning_rate=5e-4, aggregation="sequence")
    with refused(
        "checkpoint_mismatch", "trainer.aggregation", "'sequence'", "trainer.learning_rate", "0.001", "0.0005"
    ):
        load(other, path, who_other)
    full, who_full = make(tiny)
    with refused("checkpoint_mismatch", "trained_weights"):
        load(full, path, who_full)
    changed = tmp_path / "other-base"
    shutil.copytree(tiny.folder, changed)
    model = load_model(changed, model_settings())
    with torch.no_grad():
        model.model.language_model.layers[0].mlp.up_proj.weight.mul_(1.5)
    model.save_pretrained(changed)
    based, who_based = make(tiny, LORA, changed)
    with refused("checkpoint_mismatch", "frozen_weights"):
        load(based, path, who_based)


def test_save_interval_may_change_on_resume(tiny: Tiny, tmp_path: Path) -> None:
    learner, who = make(tiny)
    path = save(learner, tmp_path, {}, who)
    other, who_other = make(tiny, save_every=7, keep_checkpoints=5, max_steps=99)
    load(other, path, who_other)
    cosine, who_cosine = make(tiny, lr_scheduler="cosine")
    with refused("checkpoint_mismatch", "lr_scheduler"):
        load(cosine, path, who_cosine)


def test_rejects_damaged_checkpoint_files(tiny: Tiny, tmp_path: Path) -> None:
    learner, who = make(tiny)
    path = save(learner, tmp_path, {}, who)
    (file,) = (path / TENSORS).glob("*/*.distcp")
    whole, index = file.read_bytes(), file.with_name(INDEX).read_text()

    file.write_bytes(whole[:1000])
    with refused("checkpoint_unreadable", path):
        load(learner, path, who)
    file.write_bytes(whole)
    for old, new, value in [
        (file.name, "../../elsewhere", "'../../elsewhere'"),
        ('"float32"', '"load"', "'load'"),
        ('"offsets":[0', '"offsets":[1', ""),
        ('"offsets":[0', '"offsets":[-1', INDEX),
        ('"start":', '"strange":', INDEX),
        (index, "[]", INDEX),
    ]:
        assert old in index
        file.with_name(INDEX).write_text(index.replace(old, new))
        with refused("checkpoint_unreadable", path, value):
            load(learner, path, who)
    file.with_name(INDEX).unlink()
    with refused("checkpoint_unreadable", path):
        load(learner, path, who)
    (path / STATE_FILE).write_text(json.dumps({"format": 99, "step": 1, "identity": {}, "state": {}}))
    with refused("checkpoint_format_mismatch", path, "99", "2"):
        load(learner, path, who)


def test_full_disk_keeps_last_checkpoint(tiny: Tiny, tmp_path: Path) -> None:
    """A file-size limit simulates the full disk: writing fails in the middle of a file."""
    learner, who = make(tiny)
    learner.steps_done = 1
    save(learner, tmp_path, {}, who)
    learner.steps_done = 2
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with refused("checkpoint_not_written", "step-000002", "step-000001"):
            save(learner, tmp_path, {}, who)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert [p.name for p in tmp_path.iterdir()] == ["step-000001"]
    load(learner, tmp_path / "step-000001", who)
    assert learner.steps_done == 1


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_published_weights_equal_trained_model(tiny: Tiny, tmp_path: Path, lora: Any) -> None:
    model = load_model(tiny.folder, model_settings(lora=lora))
    publisher = Publisher(model, load_processor(tiny.folder, model_settings()), tmp_path / "processor")
    learner = Learner(model, trainer_settings(learning_rate=1e-2), temperature=1.0)
    train(learner, tiny, 1, 2)
    for version in (1, 2, 3):
        publisher.publish(learner.model, tmp_path / f"{version:06d}", learner.ranks)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002", "000003", "processor"]
    folder = tmp_path / "000003"
    with (
        safe_open(folder / "model.safetensors", "pt") as new,
        safe_open(tiny.folder / "model.safetensors", "pt") as old,
    ):
        assert set(new.keys()) == set(old.keys())
    assert {p.name for p in folder.iterdir()} == {p.name for p in tiny.folder.iterdir()}
    assert (folder / "tokenizer.json").samefile(tmp_path / "000002" / "tokenizer.json")
    published = load_model(folder, model_settings())
    load_processor(folder, model_settings())
    batch = tiny.collator.collate(tiny.samples(4, seed=1), tiny.images.open)
    with torch.no_grad():
        expected = learner.model(**model_inputs(batch)).logits
        torch.testing.assert_close(published(**model_inputs(batch)).logits, expected, atol=1e-4, rtol=1e-4)
    before = load_file(tiny.folder / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert any(not torch.equal(value, before[name]) for name, value in after.items())
    publisher.publish(learner.model, tmp_path / "last", learner.ranks)
    assert (tmp_path / "last/adapter").is_dir() == (lora is not None)
    if lora is None:
        return
    by_peft = PeftModel.from_pretrained(load_model(tiny.folder, model_settings()), str(tmp_path / "last/adapter"))
    with torch.no_grad():
        torch.testing.assert_close(by_peft(**model_inputs(batch)).logits, expected)
    merged = load_model(tmp_path / "last", model_settings())
    joined = by_peft.merge_and_unload().state_dict()
    for name, value in merged.state_dict().items():
        torch.testing.assert_close(value, joined[name])
    publisher.publish(learner.model, tmp_path / "again", learner.ranks)
    assert folder_digest(tmp_path / "again") == folder_digest(tmp_path / "last")
    assert str(tiny.folder) not in (tmp_path / "last/adapter/adapter_config.json").read_text()


def test_publishes_bf16_model_in_bf16(tiny: Tiny, tmp_path: Path) -> None:
    model = load_model(tiny.folder, model_settings(dtype="bfloat16"))
    publisher = Publisher(model, load_processor(tiny.folder, model_settings()), tmp_path / "processor")
    learner = Learner(model, trainer_settings(autocast="bf16"), temperature=1.0)
    publisher.publish(learner.model, tmp_path / "000001", learner.ranks)
    assert {value.dtype for value in load_file(tmp_path / "000001" / "model.safetensors").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "damage",
    [
        {"step": "x"},
        {"step": 2.5},
        {"step": -3},
        {"skipped": 3},
        {"skipped": {}},
        {"skipped": {"odd": 1}},
        {"state": None},
    ],
    ids=str,
)
def test_rejects_invalid_counts_before_loading(tiny: Tiny, tmp_path: Path, damage: dict[str, Any]) -> None:
    learner, who = make(tiny)
    path = save(learner, tmp_path, {}, who)
    file = path / STATE_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | damage))
    train(learner, tiny, 1)
    weights = [parameter.clone() for parameter in learner.policy.parameters()]
    with refused("checkpoint_damaged", file):
        load(learner, path, who)
    assert all(map(torch.equal, weights, learner.policy.parameters()))
