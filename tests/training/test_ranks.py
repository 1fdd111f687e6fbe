"""Collectives between ranks, and how rank processes meet and end; with real processes on gloo."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from armature.components.contracts.cluster import ClusterSettings, TrainerBundle
from armature.components.machine.network import network
from armature.components.machine.process import Program
from armature.components.training.processes import TrainerProcesses, new_attempt
from tests.builders import make_machine
from tests.production.linear_trainer import CONTINUE, OUT, WEIGHTS, installed
from tests.refusals import refused

from .forked import run_script

SCRIPT = """
import os, pickle, signal, sys, time, torch
from armature.components.training.ranks import joined
from armature.components.training.processes import TrainerProcesses
from armature.components.training.ranks import total_norm
from torch.distributed.tensor import Shard, distribute_tensor

folder = sys.argv[1]

class Stranger:
    def __reduce__(self):
        return (open, (f"{folder}/made", "w"))

with joined(TrainerProcesses(threads=1, ready_timeout=60), seed=0) as ranks:
    open(f"{folder}/pid-{ranks.rank}", "w").write(str(os.getpid()))
    whole = [torch.randn(3, 5), torch.randn(1), torch.randn(7, 2)]
    norm = torch.cat([one.flatten() for one in whole]).norm().item()
    for copies in (1, 2):
        mesh = ranks.mesh(copies)["shard"]
        shards = [distribute_tensor(one, mesh, [Shard(0)]) for one in whole[1:]]
        found = total_norm([whole[0], *shards]), total_norm(whole), total_norm([])
        assert abs(found[0] - norm) < 1e-6 * norm and abs(found[1] - norm) < 1e-6 * norm and found[2] == 0, found
    open(f"{folder}/norms-{ranks.rank}", "w").close()
    value = {"rank": ranks.rank, "text": "é" * (1 + 1000 * ranks.rank), "rows": {3: torch.full((ranks.rank,), 2.5)}}
    for rank, received in enumerate(ranks.gather(value)):
        assert received["rank"] == rank and len(received["text"]) == 1 + 1000 * rank
        assert received["rows"][3].tolist() == [2.5] * rank
    assert ranks.broadcast(["of", None, 0.5] if ranks.first else "not this") == ["of", None, 0.5]
    several, one = (torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in (3000, 7))
    large = torch.nn.Parameter(torch.zeros(5, 2**20))
    for parameter in (several, one, large):
        parameter.grad_dtype = None
        if ranks.first or parameter is not one:
            parameter.grad = torch.full(parameter.shape, 1.5 + ranks.rank)
    ranks.sum_gradients([several, one, large], torch.float32)
    for parameter, total in ((several, 4.0), (one, 1.5), (large, 4.0)):
        assert parameter.grad.dtype == torch.float32 and parameter.grad.eq(total).all()
    try:
        ranks.gather(Stranger() if ranks.first else None)
    except pickle.UnpicklingError:
        pass
    else:
        raise SystemExit("a stranger's object was made")
    open(f"{folder}/gathered-{ranks.rank}", "w").close()
    ranks.gather(None)
    if ranks.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.gather(None)
    time.sleep(600)
"""


@dataclass(frozen=True)
class Ended:
    """The result of running SCRIPT on two ranks. Both call collectives, and then the second rank is killed.

    `code` and `log` are the exit code and the last lines of the log.
    """

    folder: Path
    code: int
    log: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("ranks")
    return Ended(folder, *run_script(folder, SCRIPT))


@pytest.mark.slow
def test_gather_exchanges_data_and_refuses_pickled_objects(ended: Ended) -> None:
    assert {path.name for path in ended.folder.glob("gathered-*")} == {"gathered-0", "gathered-1"}, ended.log
    assert not (ended.folder / "made").exists()


@pytest.mark.slow
def test_norm_of_shards_equals_norm_of_whole_tensors(ended: Ended) -> None:
    """One of the tensors has a single element, so one rank's shard is empty."""
    assert {path.name for path in ended.folder.glob("norms-*")} == {"norms-0", "norms-1"}, ended.log


SILENT = """
import sys, time
from armature.components.contracts.errors import TrainerError
from armature.components.training.ranks import joined
from armature.components.training.processes import TrainerProcesses

with joined(TrainerProcesses(threads=1, ready_timeout=60, rank_timeout=1), seed=0) as ranks:
    ranks.gather(None)
    if not ranks.first:
        time.sleep(600)
    try:
        ranks.sum({"a": 1.0})
    except TrainerError as error:
        sys.exit(str(error))
"""


@pytest.mark.slow
def test_silent_rank_causes_timeout_error(tmp_path: Path) -> None:
    code, log = run_script(tmp_path, SILENT)
    assert code == 1 and "rank 0 waited 1 s for another of 2 ranks" in log and "machine.limits.rank_timeout" in log


@pytest.mark.slow
def test_killed_rank_ends_other_ranks(ended: Ended) -> None:
    assert ended.code == 137 and "rank 1 ended with exit code -9" in ended.log, ended.log
    for rank in range(2):
        assert not Path(f"/proc/{(ended.folder / f'pid-{rank}').read_text()}").exists()


def test_network_interface_accepts_name_and_address(tmp_path: Path) -> None:
    assert network("lo") == network("127.0.0.1") == "lo"
    with refused("unknown_network_interface", "'eth99'", "lo"):
        TrainerProcesses(interface="eth99").start([], rendezvous=tmp_path, log=tmp_path / "log")


def test_each_attempt_gets_new_private_folder(tmp_path: Path) -> None:
    attempts = [new_attempt(tmp_path) for _ in range(12)]
    assert len(set(attempts)) == 12 and sorted(tmp_path.iterdir()) == sorted(attempts[-2:])
    assert attempts[-1].stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_single_machine_does_not_import_ray(tmp_path: Path) -> None:
    """A training and a worker run while the module `ray` is one that exits when it is imported."""
    (tmp_path / CONTINUE).touch()
    (tmp_path / "ray.py").write_text("raise SystemExit('Ray was imported')")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from armature.components.contracts.machine import Machine, MachineTrainer\n"
        "from armature.components.machine.workers.requests import ANYTHING\n"
        "from armature.components.machine.workers.worker import make_worker\n"
        "from tests.production.linear_trainer import train\n"
        "train(Path(sys.argv[1]), Machine(threads=1, trainer=MachineTrainer(processes=2, loader_workers=0)))\n"
        "with make_worker('tests.machine.workers.misbehaving', timeout=60.0) as worker:\n"
        "    assert worker.call('echo', 1, reply=ANYTHING) == 1\n"
    )
    path = f"{tmp_path}:{installed(tmp_path)}"
    program = Program([sys.executable, "-c", code, tmp_path], log=tmp_path / "log", env={"PYTHONPATH": path})
    assert program.wait(120) == 0, program.tail(60)
    assert (tmp_path / OUT / WEIGHTS).exists()


def test_nodes_with_one_gpu_shard_one_model() -> None:
    cluster = ClusterSettings(address="auto", trainer=TrainerBundle(num_gpus=1))
    processes = TrainerProcesses.of(make_machine(trainer__nodes=2, cluster=cluster))
    assert (processes.ranks, processes.sharding, processes.gpus) == (2, "full", (0,))


def test_single_rank_starts_without_parent_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os; print(*(os.environ[n] for n in ('RANK', 'LOCAL_RANK', 'WORLD_SIZE')))")
    program = TrainerProcesses().start([script], rendezvous=tmp_path, log=tmp_path / "log")
    assert program.command == [sys.executable, str(script)]
    assert program.wait(60) == 0
    assert program.tail() == "0 0 1"


PRINT_QUEUES = "import os; print('queues', os.environ.get('CUDA_SCALE_LAUNCH_QUEUES'))"


@pytest.mark.parametrize(
    ("inherited", "environment", "gpus", "expected"),
    [
        (None, {}, (0,), "4x"),
        ("2x", {}, (0,), "2x"),
        ("2x", {"CUDA_SCALE_LAUNCH_QUEUES": "1x"}, (0,), "1x"),
        (None, {}, (), "None"),
    ],
)
def test_gpu_launch_queue_default_and_overrides(
    inherited: str | None,
    environment: dict[str, str],
    gpus: tuple[int, ...],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("CUDA_SCALE_LAUNCH_QUEUES", raising=False)
    if inherited is not None:
        monkeypatch.setenv("CUDA_SCALE_LAUNCH_QUEUES", inherited)
    processes = TrainerProcesses(gpus=gpus, environment=environment)
    program = processes.start(["-c", PRINT_QUEUES], rendezvous=tmp_path, log=tmp_path / "log")
    try:
        assert program.wait(60) == 0
        assert f"queues {expected}" in program.tail(5)
    finally:
        program.stop()
