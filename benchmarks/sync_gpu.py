"""New weights to a vLLM server on the same GPU: each way to move them, with the proof that they arrived.

Usage: python -m benchmarks.sync_gpu [3b|7b|small]: random weights of Qwen2.5-VL's sizes in bf16, of which a fiftieth
change from version to version as by a step of reinforcement. Two servers: one takes whole weights, one adapters.
The table goes to $OUT/sync-SIZE.json as well. ARMATURE_TEST_VLLM_PYTHON names the Python that has vLLM; PYTHONPATH may
have our plug-in, components/inference/served. `small` runs on a CPU, where nothing goes over a GPU's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import PeftModel

from armature.components.contracts.machine import Machine, MachineServers
from armature.components.families.family import family_of
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.command import (
    ServedAdapters,
    placeholder_token_ids,
    served_name,
    server_command,
    server_environment,
    vocabulary,
)
from armature.components.inference.lease import read_weights_id
from armature.components.inference.probe import SIXTEEN_BITS, Probe, ask_probe, distance, make_probe
from armature.components.inference.replica import Replica, reset_caches
from armature.components.inference.replies import Endpoint
from armature.components.inference.server import fault
from armature.components.inference.settings import ServerSettings
from armature.components.inference.weights import WEIGHT_SENDERS, WEIGHT_TRANSFERS
from armature.components.machine.process import Program
from armature.components.models.load import load_processor
from armature.components.models.lora import add_adapters
from armature.components.models.settings import LoraSettings, ModelSettings
from armature.components.models.tiny.build import SMALL, make_tiny_checkpoint
from armature.components.training.ranks import Ranks
from armature.components.vlm.logprobs import Policy, answer_probe
from armature.components.vlm.publish import Publisher
from benchmarks.step_case import make_model, need_gpu

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PYTHON = Path(os.environ.get("ARMATURE_TEST_VLLM_PYTHON", ".venv-vllm/bin/python"))
PLUG_IN = Path(__file__).parents[1] / "components/inference/served"
KEY, READY, CHANGED, REPEATS = "k" * 32, 240.0, 0.02, 2
SETTINGS = ServerSettings(max_model_len=1024, max_images_per_prompt=1, dtype="bfloat16")


@dataclass
class Server:
    program: Program
    endpoint: Endpoint

    async def ready(self, http: httpx.AsyncClient, folder: Path) -> bool:
        """Wait until the server is ready. If it does not start, print its log and return False."""
        began = time.monotonic()
        while reason := await fault(http, self.endpoint, folder):
            if self.program.returncode is not None or time.monotonic() - began > READY:
                print(f"{self.endpoint.url} is not ready: {reason}\n{self.program.tail(40)}", flush=True)
                return False
            await asyncio.sleep(0.5)
        return True


@contextlib.contextmanager
def server(folder: Path, work: Path, port: int, adapters: ServedAdapters | None) -> Iterator[Server]:
    """Start a server, which may not be ready yet. With `adapters` it takes adapters; otherwise it takes whole weights,
    over CUDA IPC or as folders."""
    servers = MachineServers(
        python=PYTHON,
        gpus=((0,),) if CUDA else (),
        weight_transfer="ipc" if CUDA and adapters is None else "file",
        arguments={
            "gpu_memory_utilization": 0.3,
            "kv_cache_memory_bytes": 2**30,
            "enforce_eager": True,
            "max_num_seqs": 16,
        }
        if CUDA
        else {},
    )
    machine = Machine(servers=servers)
    gpus = servers.gpus[0] if CUDA else ()
    command = server_command(folder, SETTINGS, machine, port=port, gpus=gpus, adapters=adapters)
    if adapters is None:
        command += ["--worker-extension-cls", "armature_served.versions.Versions"]
    paths = [str(PLUG_IN), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    if CUDA and find_spec("ray") is None:
        (work / "ray").mkdir(exist_ok=True)  # vLLM 0.26 imports it for CUDA IPC, and asks it nothing on this side
        (work / "ray/ray.py").touch()
        paths.append(str(work / "ray"))
    environment = server_environment(machine, api_key=KEY, gpus=gpus, adapters=adapters)
    program = Program(command, log=work / f"vllm-{port}.log", env=environment | {"PYTHONPATH": os.pathsep.join(paths)})
    try:
        yield Server(program, Endpoint(f"http://127.0.0.1:{port}", KEY))
    except BaseException:
        print(program.tail(40), flush=True)
        raise
    finally:
        program.stop()


class Trainer:
    """The training side: a model on the GPU, the versions that it publishes, and its answers to probes."""

    def __init__(self, model: Any, processor: Any, work: Path) -> None:
        self.processor, self.work, self.ranks = processor, work, Ranks(device=torch.device(DEVICE))
        self.version, self.listed = 0, dict[str, torch.Tensor]()
        self.adapt(model)

    def adapt(self, model: Any) -> None:
        """Use another model from now on: the model with adapters, or the model without them."""
        self.model, self.publisher = model, Publisher(model, self.processor, self.work / "processor")

    @property
    def folder(self) -> Path:
        return self.work / "versions" / f"{self.version:06d}"

    def publish(self, folder: Path) -> int:
        self.publisher.publish(self.model, folder, self.ranks)
        return bytes_in(folder)

    def publish_delta(self, folder: Path) -> int:
        self.publisher.publish_delta(self.model, folder, self.ranks)
        return bytes_in(folder)

    def publish_adapter(self, folder: Path) -> int:
        self.publisher.publish_adapter(self.model, folder, self.ranks)
        return bytes_in(folder)

    def list_tensors(self, _: Path) -> int:
        self.listed = self.publisher.tensors(self.model)
        return sum(tensor.numel() * tensor.element_size() for tensor in self.listed.values())

    @torch.no_grad()
    def step(self) -> Path:
        """Change the model to its next version and return the version's folder. The adapters change, or all weights if
        there are none.

        Without adapters, a fiftieth of the weights becomes the next larger bf16 number. The last norm changes by more,
        so that log-probs show the difference.

        Of these a fiftieth goes to the next number in bf16; the last norm, to be seen in log-probs, changes by more.
        """
        self.version += 1
        adapted = isinstance(self.model, PeftModel)
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.05)
            elif not adapted:
                bits = parameter.view(torch.int16)
                bits += torch.rand(bits.shape, device=bits.device, dtype=torch.float16) < CHANGED
                if name.endswith("language_model.norm.weight"):
                    parameter.mul_(1.25 if self.version % 2 else 0.8)
        return self.folder

    def answer(self, probe: Probe) -> Any:
        policy = Policy(self.model, logprobs="torch", temperature=1.0, chunk_tokens=128)
        return answer_probe(policy, self.processor, probe)


class Measured:
    """Syncs versions to a server one after the other, and records the time that each sync takes."""

    def __init__(self, trainer: Trainer, http: httpx.AsyncClient, probe: Probe, rows: list[dict[str, Any]]) -> None:
        self.trainer, self.http, self.probe, self.rows = trainer, http, probe, rows

    async def sync(
        self, what: str, endpoint: Endpoint, publish: Callable[[Path], int], load: Callable[[Path], Any], link: float
    ) -> None:
        """Make a new version and sync it. `publish` prepares the version and returns its size in bytes; `load` brings
        it to the server. `link` is the speed of the connection in bytes per second."""
        folder, times = self.trainer.step(), [time.perf_counter()]

        def lap() -> None:
            if CUDA:
                torch.cuda.synchronize()
            times.append(time.perf_counter())

        expected = self.trainer.answer(self.probe)
        lap()
        moved = publish(folder)
        lap()
        result = load(folder)
        if asyncio.iscoroutine(result):
            await result
        lap()
        replica = Replica("server", KEY, url=endpoint.url)
        replica.weights_id = await read_weights_id(self.http, endpoint)
        await reset_caches(self.http, endpoint)
        name = served_name(folder) if what == "adapter" else MODEL_NAME
        matches = distance(await ask_probe(self.http, endpoint, self.probe, name), expected)
        lap()
        seconds = [after - before for before, after in itertools.pairwise(times)]
        row = {
            "way": what,
            "bytes": moved,
            "trainer_probe": seconds[0],
            "publish": seconds[1],
            "load": seconds[2],
            "server_probe": seconds[3],
            "total": sum(seconds),
            "link_rate": link,
            "link_share": moved / link / (seconds[1] + seconds[2]),
            "nats": matches,
        }
        self.rows.append(row)
        print(
            f"{what:<12}{moved / 1e6:>11,.1f} MB  trainer's probe {seconds[0]:6.3f} s  publish {seconds[1]:7.3f}  load "
            f"{seconds[2]:7.3f}  caches, probe {seconds[3]:6.3f}  total {sum(seconds):7.3f} s  of the link "
            f"{row['link_share']:6.1%}  {matches:.1e} nats",
            flush=True,
        )
        if not matches < SIXTEEN_BITS:
            raise SystemExit(f"{what}: the server does not hold the weights: {matches} nats")


def copy_rate(source: str, target: str) -> float:
    """Return the bytes per second of a plain copy of 1 GiB, or of 64 MiB without a GPU."""
    size = 2**30 if CUDA else 2**26
    one = torch.empty(size, dtype=torch.uint8, device=source, pin_memory=CUDA and source == "cpu")
    other = torch.empty(size, dtype=torch.uint8, device=target)
    best = float("inf")
    for _ in range(5):
        if CUDA:
            torch.cuda.synchronize()
        began = time.perf_counter()
        other.copy_(one)
        if CUDA:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return size / best


def bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


async def measure(size: str, work: Path, rows: list[dict[str, Any]]) -> None:
    settings = SMALL.model_copy(update={"image_side": 112 if size == "small" else 448, "max_positions": 32_768})
    tiny = make_tiny_checkpoint("qwen2.5-vl", work / "tiny", 0, settings)
    for file in tiny.glob("*.safetensors"):
        file.unlink()  # only the processor is wanted
    arguments = ModelSettings(source=str(tiny))
    processor = load_processor(tiny, arguments)
    model = make_model(tiny, "sdpa", DEVICE, size == "small", "7b" if size == "7b" else "3b").eval()
    trainer, began = Trainer(model, processor, work), time.perf_counter()
    base = work / "base"
    trainer.publish(base)
    count, seconds = sum(p.numel() for p in model.parameters()), time.perf_counter() - began
    print(f"{size}: {count / 1e9:.2f} B weights, written in {seconds:.1f} s", flush=True)
    memory, host = copy_rate(DEVICE, DEVICE), copy_rate("cpu", DEVICE)
    print(f"copies: {memory / 1e9:.0f} GB/s in the GPU's memory, {host / 1e9:.1f} from pinned main memory", flush=True)
    lora = LoraSettings(rank=16, targets=("all",), served_as="adapter")
    probe = make_probe(vocabulary(base)[0], placeholder_token_ids(base), 512, True)
    async with httpx.AsyncClient(timeout=300, trust_env=False) as http:
        measured = Measured(trainer, http, probe, rows)
        with server(base, work, 8701, None) as plain, server(base, work, 8702, ServedAdapters(16)) as adapted:
            up = await asyncio.gather(plain.ready(http, base), adapted.ready(http, base))
            if up[1]:
                trainer.adapt(add_adapters(model, family_of(model.config), lora, ()))
                load = moves(http, "adapter", adapted.endpoint)
                for _ in range(REPEATS):
                    await measured.sync("adapter", adapted.endpoint, trainer.publish_adapter, load, host)
                trainer.adapt(trainer.model.unload())
            adapted.program.stop()
            if up[0]:
                await whole_weights(measured, plain.endpoint, memory, host)


async def whole_weights(measured: Measured, endpoint: Endpoint, memory: float, host: float) -> None:
    trainer, http = measured.trainer, measured.http
    await measured.sync("file", endpoint, trainer.publish, moves(http, "file", endpoint), host)
    trainer.publisher.series.begin(trainer.folder, trainer.ranks)
    for number in range(1 + REPEATS):  # the first time the server reads the checkpoint as well
        name = "delta" if number else "delta, first"
        await measured.sync(name, endpoint, trainer.publish_delta, moves(http, "delta", endpoint), host)
    if CUDA:
        sender = WEIGHT_SENDERS["ipc"]([endpoint], 120)
        for _ in range(REPEATS + 1):
            await measured.sync("ipc", endpoint, trainer.list_tensors, lambda _: sender.send(trainer.listed), memory)
        trainer.listed.clear()


def moves(http: httpx.AsyncClient, way: str, endpoint: Endpoint) -> Callable[[Path], Any]:
    transfer = WEIGHT_TRANSFERS[way]()
    return lambda folder: transfer.transfer(http, [endpoint], folder, None)


def main() -> None:
    size = sys.argv[1] if len(sys.argv) > 1 else "3b" if CUDA else "small"
    if size not in ("3b", "7b", "small"):
        raise SystemExit(f"{size!r} is not 3b, 7b or small")
    if size != "small":
        need_gpu("python -m benchmarks.sync_gpu small")
    device, rows = torch.cuda.get_device_name() if CUDA else "CPU", list[dict[str, Any]]()
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as scratch:
            asyncio.run(measure(size, Path(scratch), rows))
    finally:
        document = {"size": size, "device": device, "torch": torch.__version__, "changed": CHANGED, "rows": rows}
        (Path(os.environ.get("OUT", ".")) / f"sync-{size}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{device}, torch {torch.__version__}; all of it took {time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
