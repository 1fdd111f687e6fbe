"""The training loop, run in this process on a tiny policy and a dataset of six episodes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from armature.components.configuration.stages import run_stage
from armature.components.models.context_parallel import ContextParallel
from armature.components.robots.datasets.settings import DatasetSettings
from armature.components.robots.datasets.source import pinned
from armature.components.robots.imitation.worker import PolicyWorker
from armature.components.robots.policies.molmoact2.checkpoints.checkpoint import load_policy
from armature.components.training.ranks import Ranks
from tests.builders import make_machine
from tests.refusals import refused

from .conftest import LAYOUT, Job, make_job, write_dataset
from .settings import AUGMENTATION, LORA

SPEED = ("samples_per_second", "memory/peak_gib")


def rows_of(job: Job) -> list[dict[str, float]]:
    """Return the training history without the metrics that depend on the machine."""
    rows = [json.loads(line) for line in job.history.read_text().splitlines()]
    return [{k: v for k, v in row.items() if k not in SPEED and not k.startswith("timing/")} for row in rows]


def weights_of(job: Job) -> dict[str, torch.Tensor]:
    return load_file(job.checkpoint / "model.safetensors")


CASES: dict[str, dict[str, Any]] = {
    "full": {"ema_decay": 0.9, "policy": {"action_mode": "both", "llm_residual_dropout": 0.1}},
    "lora": {
        "mode": "lora",
        "lora": LORA,
        "lora_dropout": 0.1,
        "packing": {"max_row_tokens": 200, "max_row_examples": 2},
        "augmentation": AUGMENTATION,
        "file_shuffle": {"lanes": 2, "window": 2},
    },
}


@pytest.mark.parametrize(
    ("case", "loaders"), [("full", 0), ("lora", 0), pytest.param("lora", 2, marks=pytest.mark.slow)]
)
def test_resumed_training_equals_uninterrupted_training(
    inputs: dict[str, Path], tmp_path: Path, case: str, loaders: int
) -> None:
    whole, stopped = (
        make_job(inputs, tmp_path / name, machine=make_machine(threads=1, loader_workers=workers), **CASES[case])
        for name, workers in (("whole", 0), ("stopped", loaders))
    )
    whole.train()
    first, second = (job.service.checkpoints / "step-000002" for job in (whole, stopped))
    shutil.copytree(first, second)
    lines = whole.history.read_text().splitlines(keepends=True)
    stopped.history.write_text("".join(lines[:4]) + '{"step": 4, "lo')  # the process died while recording step 3
    torch.manual_seed(99)
    stopped.train()
    last = {row["step"]: row for row in rows_of(stopped)}
    assert [last[step] for step in range(5)] == rows_of(whole)
    one, two = weights_of(whole), weights_of(stopped)
    assert all(torch.equal(value, two[name]) for name, value in one.items())


def test_trained_policy_is_self_contained(inputs: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, mode="lora_expert", lora=LORA, max_steps=2)
    job.train()
    moved = tmp_path / "elsewhere"
    shutil.move(job.checkpoint, moved)
    loaded = load_policy(moved)
    processor = loaded.processor()
    assert processor.cameras == ("observation.images.front",)
    assert (processor.state_dimensions, processor.action_dimensions) == (2, 3)
    assert loaded.settings.norm_tag == "trained"
    before = load_file(inputs["policy"] / "checkpoint" / "model.safetensors")
    after = load_file(moved / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any("action_expert" in name for name in changed)
    assert not any("wte" in name or "norm" in name for name in changed)


def test_saved_weights_are_the_moving_average(inputs: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(inputs, tmp_path, ema_decay=0.25, max_steps=2)
    worker = PolicyWorker(job.service, Ranks())
    average = load_file(inputs["policy"] / "checkpoint" / "model.safetensors")[
        "model.action_expert.action_embed.weight"
    ]
    for step in (1, 2):
        worker.run({"name": "step", "step": step}, None)
        trained = worker.learner.model.get_parameter("action_expert.action_embed.weight").detach()
        average = 0.25 * average + 0.75 * trained
    worker.run({"name": "publish", "folder": str(job.checkpoint)}, None)
    torch.testing.assert_close(weights_of(job)["model.action_expert.action_embed.weight"], average)


def test_files_of_a_remote_dataset_are_prefetched(
    inputs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARMATURE_CACHE", str(tmp_path / "cache"))
    write_dataset(tmp_path / "data/dataset", 6, layout=LAYOUT.model_copy(update={"data_files_size_in_mb": 1e-3}))
    url = "memory://fetched-ahead/dataset"
    fsspec.filesystem("memory").put(str(tmp_path / "data/dataset"), url, recursive=True)
    stored = run_stage("dataset", pinned(DatasetSettings(path=url)), {}, make_machine(store=tmp_path / "store")).path
    losses = []
    for name, dataset in (("folder", tmp_path / "data"), ("store", stored)):
        shuffle = {"file_shuffle": {"lanes": 1, "window": 2}, "heldout": None}
        job = make_job(inputs | {"dataset": dataset}, tmp_path / name, max_steps=50, batch_size=2, **shuffle)
        worker = PolicyWorker(job.service, Ranks())
        losses.append([worker.run({"name": "step", "step": step}, None)["loss"] for step in (1, 2)])
    assert losses[0] == losses[1]
    deadline = time.monotonic() + 10
    while len(list((tmp_path / "cache/datasets").rglob("data/*/[!.]*.parquet"))) < 4:  # two files of each window
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("workers", [0, 1])
def test_damaged_frame_is_named_also_by_a_loader_process(inputs: dict[str, Path], tmp_path: Path, workers: int) -> None:
    shutil.copytree(inputs["dataset"], tmp_path / "data")
    (file,) = tmp_path.glob("data/dataset/data/*/*.parquet")
    table, name = pq.read_table(file), "observation.images.front"
    damaged = pa.array([{"bytes": b"junk", "path": None}] * len(table), table.schema.field(name).type)
    pq.write_table(table.set_column(table.column_names.index(name), name, damaged), file)
    machine = make_machine(threads=1, loader_workers=workers, ready_timeout=120)
    job = make_job(inputs | {"dataset": tmp_path / "data"}, tmp_path / "out", machine=machine, heldout=None)
    with refused("image_unreadable", "dataset, episode", name):
        job.train()


@pytest.mark.parametrize(
    ("changes", "code", "shown"),
    [
        ({"batch_size": 3, "machine": make_machine(trainer__processes=2)}, "batch_not_divisible", ("batch_size 3", 2)),
        ({"file_shuffle": {"lanes": 3}, "machine": make_machine(trainer__processes=2)}, "lanes_not_divisible", (3, 2)),
        (
            {"policy": {"image_keys": ("observation.images.top",)}},
            "camera_image_missing",
            ("'observation.images.top'",),
        ),
        ({"heldout": {"fraction": 0.99}}, "heldout_too_large", ("6 of 6",)),
    ],
    ids=["shares", "lanes", "camera", "heldout"],
)
def test_rejects_untrainable_settings(
    inputs: dict[str, Path], tmp_path: Path, changes: dict[str, Any], code: str, shown: tuple[object, ...]
) -> None:
    with refused(code, *shown):
        make_job(inputs, tmp_path, **changes).train()


def test_rejects_context_parallelism(inputs: dict[str, Path], tmp_path: Path) -> None:
    ranks = Ranks(context=ContextParallel(0, 2, None))
    with refused("context_parallel_unsupported", "machine.trainer.context_parallel"):
        make_job(inputs, tmp_path, batch_size=2).train(ranks)
