"""Settings and fixtures of all tests: no network, no telemetry, one thread."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from tests.builders import make_machine
from tests.hub_server import HubServer, serve_hub

if TYPE_CHECKING:
    from armature.components.inference.server import VllmServer

hypothesis.settings.register_profile("armature", deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("armature")

os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    DO_NOT_TRACK="1",
    MLFLOW_DISABLE_TELEMETRY="true",
    PREFECT_SERVER_ANALYTICS_ENABLED="false",
    TOKENIZERS_PARALLELISM="false",
    OMP_NUM_THREADS="1",
    OMP_WAIT_POLICY="passive",
)

Command = Callable[..., "Done"]

ON_ONE_WORKER = {"shared_server": r"\b(shared_server|joined_url)\b", "prefect_server": r"\bprefect_server\b"}
"""Fixtures that take seconds to start, with a pattern of their uses. All test files whose text matches the pattern run
on the same worker, so that the fixture starts only once."""


@cache
def group_of(file: str) -> str:
    """Return the name of the group that a test file belongs to. It is the name of a fixture in `ON_ONE_WORKER` or the
    file itself. All tests of a group run on the same worker."""
    text = Path(file).read_text()
    return next((fixture for fixture, pattern in ON_ONE_WORKER.items() if re.search(pattern, text)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make `--dist loadfile` keep the groups of `group_of` together, not only the tests of a file. The groups of xdist
    3.8 itself have no effect with pytest 9.2."""
    from xdist.scheduler import LoadFileScheduling

    class ByGroup(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(str(config.rootpath / super()._split_scope(nodeid)))

    return ByGroup(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Turn garbage collection off while tests are imported. It would take a quarter of the import time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def file_of(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order test files so that all workers stay busy, and give slow tests a longer timeout.

    Files with slow tests come first, so that no worker still runs one when the others are done. Files marked as `waits`
    mostly wait for timeouts and retries, so they are spread among the slow files.
    """
    for item in items:
        for fixture in ON_ONE_WORKER.keys() & getattr(item, "fixturenames", ()):
            if group_of(str(item.path)) != fixture:
                raise pytest.UsageError(f"{item.path} uses {fixture}: extend its pattern in ON_ONE_WORKER")
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(900))
    if "PYTEST_XDIST_WORKER" in os.environ:
        slow, waiting = (
            list(dict.fromkeys(file_of(item) for item in items if item.get_closest_marker(name)))
            for name in ("slow", "waits")
        )
        places = {file: 2 * place for place, file in enumerate(slow)} | {
            file: 2 * place * len(slow) // len(waiting) + 1 for place, file in enumerate(waiting)
        }
        items.sort(key=lambda item: places.get(file_of(item), 2 * len(slow) + 2))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that is marked as `@pytest.mark.gpu(n)` if this machine has fewer than n CUDA devices."""
    if marker := item.get_closest_marker("gpu"):
        import torch

        needed = marker.args[0] if marker.args else 1
        if torch.cuda.device_count() < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine has {torch.cuda.device_count()}")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is an `async def` in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture(autouse=True)
def environment_of_one_test() -> Iterator[None]:
    """Restore `os.environ` after each test, because MLflow and `armature run` write addresses there.

    Without this, a later test in the same process would use the MLflow store of an earlier test.
    """
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def secrets_of_one_test(monkeypatch) -> None:
    """Forget the secrets that a test registers. They would otherwise be blanked out in the errors of later tests."""
    from armature.components.contracts import errors

    monkeypatch.setattr(errors, "_forms", set(errors._forms))


@dataclass(frozen=True)
class Done:
    """Exit code and output of a command."""

    code: int | str | None
    stdout: str
    stderr: str


@pytest.fixture
def armature(tmp_path, monkeypatch, capsys) -> Command:
    """Return a function that runs the command `armature` in this process, in the test's folder, and returns its
    output."""
    from armature.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["armature", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        return Done(ended.value.code, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    """A Prefect server for all tests of a session, because starting one takes about 15 s."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def hub(tmp_path) -> Iterator[HubServer]:
    """A stand-in for the Hugging Face hub that huggingface_hub uses in the test. Its cache is in the test's folder."""
    with serve_hub(tmp_path / "hub-cache") as served:
        yield served


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory) -> Path:
    """The file of an empty MLflow database for the tests to copy. It is made once, because making its tables takes
    seconds."""
    from mlflow import MlflowClient

    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    MlflowClient(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def tracking(tmp_path, monkeypatch, empty_mlflow) -> str:
    """The address of an empty MLflow database in the test's folder, which becomes the working folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mlflow.db").write_bytes(empty_mlflow.read_bytes())
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@dataclass(frozen=True)
class SharedServer:
    """A running model server, which a pool joins with `machine.servers.endpoints=[url]` and `key` in VLLM_API_KEY. It
    was started with `checkpoint`."""

    url: str
    key: str
    checkpoint: Path


def real_server(log_folder: Path, key: str) -> VllmServer:
    """Return a vLLM server that has not been started yet. It is deterministic: an answer does not depend on other
    requests."""
    from armature.components.inference.server import VllmServer
    from armature.components.inference.settings import ServerSettings

    python = Path(__file__).parents[1] / ".venv-vllm/bin/python"
    if not python.exists():
        pytest.skip("needs .venv-vllm: make environments")
    # The plug-in of this checkout, also where another one is installed beside vLLM.
    served = Path(__file__).parents[1] / "components/inference/served"
    variables = {"PYTHONPATH": str(served), "VLLM_CPU_ATTN_SPLIT_KV": "0"}
    machine = make_machine(servers__python=python, threads=1, servers__environment=variables)
    settings = ServerSettings(max_model_len=1024, max_images_per_prompt=2, dtype="float32")
    return VllmServer(settings, machine, index=0, log_folder=log_folder, api_key=key)


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory) -> Iterator[SharedServer]:
    """One real vLLM server for all tests of a session, because starting it takes 40 s. Its model has the sizes and the
    tokenizer of the recipe train-vlm/colors.

    A pool that joins the server loads its own weights into it.
    """
    from anyio.from_thread import start_blocking_portal

    from armature.components.configuration import load_recipe
    from armature.components.models.tiny import make_tiny_checkpoint

    folder, model = tmp_path_factory.mktemp("shared-server"), load_recipe("train-vlm/colors").sections["model"]
    # Its tokenizer knows the answers' words: a server turns tokens into text with the one that it began with.
    sizes = model.tiny.model_copy(update={"format": model.tiny.format.model_copy(update={"steps": 1})})
    checkpoint = make_tiny_checkpoint("qwen2-vl", folder / "model", seed=0, settings=sizes)
    key = "a key for the tests"
    server = real_server(folder / "logs", key)
    with start_blocking_portal() as portal:
        portal.call(server.start, checkpoint)
        yield SharedServer(server.url, key, checkpoint)
        portal.call(server.stop)


@pytest.fixture
def joined_url(shared_server, monkeypatch) -> str:
    """The URL of the shared server. Its key is in the environment variable VLLM_API_KEY."""
    monkeypatch.setenv("VLLM_API_KEY", shared_server.key)
    return shared_server.url
