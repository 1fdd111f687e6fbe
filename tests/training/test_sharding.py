"""Sharded training (FSDP2, full and hybrid) on gloo ranks: the same steps as one rank, and resumable checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from armature.components.contracts.cluster import ClusterSettings, TrainerBundle
from armature.components.models.settings import LoraSettings
from armature.components.rollouts.batches.table import write_batch
from armature.components.training.checkpoints import TENSORS
from armature.components.training.processes import private_folder
from armature.components.training.service_settings import service_settings
from armature.components.vlm.client import TrainerClient
from tests.builders import make_machine
from tests.vlm.conftest import LORA, Tiny

from .rewriting import read

FORKED = Path(__file__).with_name("forked.py")


@dataclass(frozen=True)
class Case:
    """The settings of a training, and the numbers of the batches it trains on."""

    lora: LoraSettings | None = None
    trainer: dict[str, Any] = field(default_factory=dict)
    batches: tuple[int, ...] = (0, 1, 2)
    model: dict[str, Any] = field(default_factory=dict)


SEQUENCES = {"objective": {"name": "gspo"}, "aggregation": "sequence", "kl_coefficient": 0.1}
CORRECTED = {"correction": {"mode": "truncate", "level": "sequence"}}
WIDE = {"max_tokens_per_micro_batch": 16384, "max_rows_per_micro_batch": 256}
"""Trainer settings with limits so high that one rank puts the whole batch into one micro-batch."""
CASES = {
    "full": Case(),
    "lora": Case(lora=LORA),
    "one sample": Case(batches=(3,)),
    "one sample, packed": Case(trainer={"packing": True}, batches=(3,)),
    "even": Case(trainer=WIDE, batches=(0,)),
    "even, packed": Case(trainer={"packing": True, **WIDE}, batches=(0,)),
    "even, packed, bfloat16": Case(
        trainer={"packing": True, "weights": "bfloat16", **WIDE}, batches=(0,), model={"dtype": "bfloat16"}
    ),
    "one by one, bfloat16": Case(
        trainer={"weights": "bfloat16", "max_rows_per_micro_batch": 1}, model={"dtype": "bfloat16"}
    ),
    "shared": Case(trainer={"packing": True, **SEQUENCES}),
    "shared, lora": Case(lora=LORA, trainer={"packing": True, "samples_per_update": 4, **CORRECTED}),
}
RESUMED = ("full", "lora")
SHARED = ("shared", "shared, lora")
"""Names of the cases in which two ranks share each sequence."""
COPIED = ("one by one, bfloat16",)
"""Names of the cases in which each of two ranks has a copy of the whole model."""


@dataclass(frozen=True)
class Result:
    """The result of a training in one process: the metrics of its steps, the log-probs of the first batch, and the
    published weights."""

    metrics: list[dict[str, float]]
    scores: list[list[float]]
    weights: dict[str, torch.Tensor]


class Runs:
    """Trains cases on several ranks, which are processes forked from one running program."""

    def __init__(self, tiny: Tiny, root: Path, program: subprocess.Popen[str]) -> None:
        self.tiny, self.root, self.program = tiny, root, program
        self.batches = batch_folders(tiny, root)

    def folder(self, name: str, processes: int, suffix: str = "") -> Path:
        return self.root / f"{name} on {processes}{suffix}"

    def run(
        self,
        names: Iterable[str],
        processes: int,
        most_batches: int = 3,
        suffix: str = "",
        nodes: int = 1,
        sharing: int = 1,
        copied: bool = False,
        experts: bool = False,
    ) -> dict[str, Result]:
        """Train the cases `names` and return their results.

        Args:
            processes: number of ranks on each node. They shard the model, or with `copied` each has a copy.
            nodes: number of nodes; each of several nodes has a copy of the model.
            sharing: number of ranks that share each sequence.
            experts: divide experts among the ranks.
        """
        sharding = "hybrid" if nodes > 1 else "full" if processes > 1 and not copied else None
        sharding = "experts" if experts else sharding
        machine = make_machine(
            trainer__nodes=nodes,
            cluster=ClusterSettings(address="auto", trainer=TrainerBundle()) if nodes > 1 else None,
            trainer__processes=processes,
            trainer__sharding=sharding,
            trainer__context_parallel=sharing,
            threads=1,
            loader_workers=0,
        )
        folders = {name: self.folder(name, processes, suffix) for name in names}
        cases = []
        for name, folder in folders.items():
            model = {"lora": CASES[name].lora, **CASES[name].model}
            policy = self.tiny.policy(model, adam_epsilon=1e-3, **CASES[name].trainer)
            settings = service_settings(policy, machine, folder)
            folder.mkdir(parents=True, exist_ok=True)
            batches = [self.batches[number] for number in CASES[name].batches][:most_batches]
            cases.append((settings.model_dump(mode="json"), [str(batch) for batch in batches]))
        (self.root / "cases.json").write_text(json.dumps(cases))
        request = [nodes * processes, str(private_folder(self.root / "rendezvous")), str(self.root / "cases.json")]
        assert self.program.stdin is not None and self.program.stdout is not None
        self.program.stdin.write(json.dumps(request) + "\n")
        self.program.stdin.flush()
        assert self.program.stdout.readline() == "0\n", (self.root / "log").read_text()[-6000:]
        return {name: read_result(folder) for name, folder in folders.items()}


def read_result(folder: Path) -> Result:
    metrics, scores = json.loads((folder / "results.json").read_text())
    return Result(metrics, scores, load_file(folder / "out" / "model.safetensors"))


def batch_folders(tiny: Tiny, root: Path) -> list[Path]:
    """Write three batches of six samples and one batch of a single sample."""
    folders = [root / f"batch-{step}" for step in (1, 2, 3, 4)]
    for step, folder in enumerate(folders, 1):
        folder.mkdir()
        write_batch(folder, tiny.samples(6 if step < 4 else 1, seed=step))
    return folders


@contextmanager
def started(tiny: Tiny, root: Path) -> Iterator[Runs]:
    """Start the program that trains on ranks, and end it afterwards."""
    pipe = subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with (
        (root / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, FORKED], stdin=pipe, stdout=pipe, stderr=log, text=True, env=environment
        ) as program,
    ):
        yield Runs(tiny, root, program)


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    with started(tiny, tmp_path_factory.mktemp("sharding")) as runs:
        yield runs


@pytest.fixture(scope="module")
def one_rank(runs: Runs) -> dict[str, Result]:
    return runs.run(CASES, processes=1)


@pytest.fixture(scope="module")
def two_ranks(runs: Runs) -> dict[str, Result]:
    """Results after step 2 of two ranks that shard the model."""
    return runs.run(CASES.keys() - {*SHARED, *COPIED}, processes=2, most_batches=2)


@pytest.fixture(scope="module")
def resumed(runs: Runs, two_ranks: dict[str, Result]) -> dict[str, Result]:
    """Results of two new ranks that resumed from the checkpoint after step 2 and made step 3."""
    return runs.run(RESUMED, processes=2)


def assert_same_weights(one: Result, two: Result) -> None:
    assert one.weights.keys() == two.weights.keys()
    for name, value in one.weights.items():
        torch.testing.assert_close(value, two.weights[name], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", RESUMED)
def test_sharded_steps_equal_steps_of_one_rank(
    case: str, one_rank: dict[str, Result], resumed: dict[str, Result]
) -> None:
    one, two = one_rank[case], resumed[case]
    assert len(two.metrics) == 1
    for name in ("loss", "importance_ratio", "entropy", "mismatch_kl", "grad_norm"):
        assert two.metrics[0][name] == pytest.approx(one.metrics[2][name], rel=1e-3, abs=1e-5), name
    for a, b in zip(one.scores, two.scores, strict=True):
        torch.testing.assert_close(torch.tensor(a), torch.tensor(b), atol=1e-4, rtol=0)
    assert_same_weights(one, two)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["one sample", "one sample, packed"])
def test_rank_without_trained_token_takes_part(
    case: str, one_rank: dict[str, Result], two_ranks: dict[str, Result]
) -> None:
    one, two = one_rank[case], two_ranks[case]
    assert two.metrics[0]["loss"] == pytest.approx(one.metrics[0]["loss"], rel=1e-4)
    assert two.metrics[0]["grad_norm"] == pytest.approx(one.metrics[0]["grad_norm"], rel=1e-4)
    assert_same_weights(one, two)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", ["even", "even, packed"])
def test_one_micro_batch_is_divided_among_two_ranks(
    case: str, one_rank: dict[str, Result], two_ranks: dict[str, Result]
) -> None:
    """In packed rows the beginning of a group that is on both ranks is computed twice."""
    one, two = one_rank[case], two_ranks[case]
    assert two.metrics[0]["loss"] == pytest.approx(one.metrics[0]["loss"], rel=1e-4)
    assert two.metrics[0]["grad_norm"] == pytest.approx(one.metrics[0]["grad_norm"], rel=1e-4)
    assert_same_weights(one, two)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bf16_sharded_gradient_equals_one_rank(one_rank: dict[str, Result], two_ranks: dict[str, Result]) -> None:
    """Losses and norms agree up to the 8 bits of bf16."""
    one, two = (ran["even, packed, bfloat16"].metrics[0] for ran in (one_rank, two_ranks))
    assert two["loss"] == pytest.approx(one["loss"], rel=0.02)
    assert two["grad_norm"] == pytest.approx(one["grad_norm"], rel=0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_overlapped_gradients_equal_those_of_one_rank(runs: Runs, one_rank: dict[str, Result]) -> None:
    """Each rank has three micro-batches of one sample. From step 2 on, sums start in the third backward pass."""
    two = runs.run(COPIED, processes=2, copied=True)
    for name, result in two.items():
        for ours, theirs, tolerance in zip(result.metrics, one_rank[name].metrics, (1e-5, 1e-2, 1e-2), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=tolerance, abs=1e-6)
            assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=tolerance)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("processes", [1, 3])
def test_checkpoint_of_two_ranks_resumes_on_other_number_of_ranks(
    runs: Runs, two_ranks: dict[str, Result], processes: int
) -> None:
    """A checkpoint saved right after resuming has the same weights, moments and counts, bit for bit."""
    checkpoint, suffix = "checkpoints/step-000002", " from 2"
    for name in RESUMED:
        shutil.copytree(runs.folder(name, 2) / checkpoint, runs.folder(name, processes, suffix) / checkpoint)
    results = runs.run(RESUMED, processes, most_batches=2, suffix=suffix)
    for name in RESUMED:
        assert results[name].metrics == []
        before, after = (
            {key: value for key, value in read(folder / checkpoint / TENSORS).items() if not key.startswith("rng/")}
            for folder in (runs.folder(name, 2), runs.folder(name, processes, suffix))
        )
        assert before.keys() == after.keys() and any("exp_avg_sq" in key for key in before)
        assert all(torch.equal(value, after[key]) for key, value in before.items())
        parts = (runs.folder(name, processes, suffix) / checkpoint / TENSORS).glob("rank-*")
        assert len(list(parts)) == processes
        one, other = two_ranks[name].weights, results[name].weights
        assert all(torch.equal(value, other[key]) for key, value in one.items())


@pytest.fixture(scope="module")
def two_nodes(runs: Runs) -> dict[str, Result]:
    """Results of step 3 on two nodes with two ranks each, which resumed from their own checkpoint after step 2."""
    runs.run(RESUMED, processes=2, most_batches=2, suffix=" of 2 nodes", nodes=2)
    return runs.run(RESUMED, processes=2, suffix=" of 2 nodes", nodes=2)


def largest_difference(one: Result, two: Result) -> float:
    assert one.weights.keys() == two.weights.keys()
    return max(float((value - two.weights[name]).abs().max()) for name, value in one.weights.items())


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hybrid_sharding_equals_step_of_one_rank(
    runs: Runs, one_rank: dict[str, Result], two_nodes: dict[str, Result]
) -> None:
    for name in RESUMED:
        one, two = one_rank[name], two_nodes[name]
        assert len(two.metrics) == 1
        for metric in ("loss", "entropy", "mismatch_kl", "grad_norm"):
            assert two.metrics[0][metric] == pytest.approx(one.metrics[2][metric], rel=1e-4, abs=1e-6), metric
        assert largest_difference(one, two) < 1e-6
        saved = runs.folder(name, 2, " of 2 nodes") / "checkpoints/step-000002" / TENSORS
        sizes = [sum(file.stat().st_size for file in (saved / f"rank-{rank}").iterdir()) for rank in range(4)]
        assert max(sizes) < 2 * min(sizes)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("nodes", "processes"), [(1, 2), (1, 1), (2, 1)])
def test_checkpoint_of_two_nodes_resumes_on_other_number_of_nodes(
    runs: Runs, two_nodes: dict[str, Result], nodes: int, processes: int
) -> None:
    suffix = f" of {nodes} nodes from 2"
    for name in RESUMED:
        folders = runs.folder(name, 2, " of 2 nodes"), runs.folder(name, processes, suffix)
        shutil.copytree(*(folder / "checkpoints/step-000002" for folder in folders))
    results = runs.run(RESUMED, processes, suffix=suffix, nodes=nodes)
    for name in RESUMED:
        assert len(results[name].metrics) == 1
        assert largest_difference(results[name], two_nodes[name]) < 1e-6


@pytest.fixture(scope="module")
def shared(runs: Runs) -> dict[str, Result]:
    """Results after step 2 of two ranks that share each sequence."""
    return runs.run(SHARED, processes=2, most_batches=2, suffix=" shared", sharing=2)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", SHARED)
def test_context_parallel_steps_equal_steps_of_one_rank(
    case: str, one_rank: dict[str, Result], shared: dict[str, Result]
) -> None:
    """The losses are over whole sequences, which no rank has, and the same ranks shard the model."""
    one, two = one_rank[case], shared[case]
    assert len(two.metrics) == 2
    for before, after in zip(one.metrics, two.metrics, strict=False):
        assert before.keys() == after.keys() and after["tokens/trained"] > 0
        for name in before.keys() - {"timing/train_s", "tokens_per_second", "memory/peak_gib"}:
            assert after[name] == pytest.approx(before[name], rel=1e-4, abs=1e-6), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("processes", "sharing"), [(2, 1), (1, 1), (4, 2)])
def test_context_parallel_checkpoint_resumes_on_other_number_of_ranks(
    runs: Runs, one_rank: dict[str, Result], shared: dict[str, Result], processes: int, sharing: int
) -> None:
    suffix = f" shared by {sharing} from 2"
    for name in SHARED:
        folders = runs.folder(name, 2, " shared"), runs.folder(name, processes, suffix)
        shutil.copytree(*(folder / "checkpoints/step-000002" for folder in folders))
    results = runs.run(SHARED, processes, suffix=suffix, sharing=sharing)
    for name in SHARED:
        assert len(results[name].metrics) == 1
        assert results[name].metrics[0]["loss"] == pytest.approx(one_rank[name].metrics[2]["loss"], rel=1e-4, abs=1e-6)
        assert largest_difference(results[name], one_rank[name]) < 1e-6


@pytest.mark.gpu(2)
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("autocast", ["none", "bf16"])
def test_two_gpus_make_same_step_as_one(tiny: Tiny, tmp_path: Path, lora: Any, autocast: str) -> None:
    """Results agree in fp32 up to the order of sums, in bf16 up to its eight bits. Step 3 is made after a resume."""
    batches = batch_folders(tiny, tmp_path)
    dtype = "float32" if autocast == "none" else "bfloat16"
    model = {"lora": lora, "dtype": dtype, "gradient_checkpointing": True}
    policy = tiny.policy(model, adam_epsilon=1e-3, autocast=autocast)
    results = []
    for gpus in ((0,), (0, 1)):
        machine = make_machine(trainer__processes=len(gpus), trainer__gpus=gpus, loader_workers=2)
        with TrainerClient(policy, machine, tmp_path / f"gpus-{len(gpus)}") as trainer:
            metrics = [trainer.step(k, batches[k - 1]) for k in (1, 2)]
            trainer.save()
            trainer.settle()
            trainer.step(3, batches[2])
            trainer.restart()
            assert trainer.resume() == 2
            metrics.append(trainer.step(3, batches[2]))
            scores = np.concatenate(trainer.score(batches[0]))
            folder = tmp_path / f"published-{len(gpus)}"
            trainer.publish(folder, 3)
            results.append((metrics, scores, load_file(folder / "model.safetensors")))
    (one, scores_one, weights_one), (two, scores_two, weights_two) = results
    exact = autocast == "none"
    for a, b in zip(one, two, strict=True):
        for name in ("loss", "importance_ratio", "entropy", "mismatch_kl", "grad_norm"):
            assert a[name] == pytest.approx(b[name], rel=1e-3 if exact else 0.05, abs=1e-5 if exact else 0.01), name
    print(autocast, lora is not None, "largest difference of log-probs", np.abs(scores_one - scores_two).max())
    np.testing.assert_allclose(scores_one, scores_two, atol=1e-3 if exact else 0.1)
    assert weights_one.keys() == weights_two.keys()
    for name, value in weights_one.items():
        torch.testing.assert_close(value, weights_two[name], atol=1e-4 if exact else 1e-2, rtol=1e-3 if exact else 0.05)
