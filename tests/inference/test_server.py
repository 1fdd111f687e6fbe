"""Errors of a server that cannot start. A shell script stands in for vLLM."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import re
import socket
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from armature.components.contracts.machine import Machine, MachineServers
from armature.components.families.family import FAMILIES
from armature.components.inference import host
from armature.components.inference.command import (
    ServedAdapters,
    expert_layout,
    server_command,
    server_environment,
)
from armature.components.inference.host import free_port
from armature.components.inference.server import VllmServer, cause_of
from armature.components.inference.settings import ServerSettings
from armature.components.models.tiny import make_tiny_checkpoint
from tests.builders import make_machine
from tests.refusals import refused

pytestmark = pytest.mark.waits

SETTINGS = ServerSettings(max_model_len=512, max_images_per_prompt=2, dtype="float32")


def start(tmp_path: Path, checkpoint: Path, machine: Machine, index: int = 0) -> VllmServer:
    server = VllmServer(SETTINGS, machine, index=index, log_folder=tmp_path / "logs", api_key="secret")
    asyncio.run(server.start(checkpoint))
    return server


def script(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


LAST_WORDS = {
    "ValueError: Model architectures ['X'] are not supported for now": "",
    "ModuleNotFoundError: No module named 'vllm'": "armature setup",
    "ValueError: To serve one request, 9 GiB KV cache is needed": "VLLM_CPU_KVCACHE_SPACE",
    "OSError: [Errno 98] Address already in use": "",
    "api_server.py: error: unrecognized arguments: --x": "machine.servers.arguments",
    "ModuleNotFoundError: No module named 'armature_served'": "components/inference/served",
    "something else": "",
}


def test_dead_server_error_has_last_lines_and_remedy(tmp_path, checkpoint):
    folder, remedies = checkpoint("a"), set()
    for attempt, (output, name) in enumerate(LAST_WORDS.items()):
        python = script(tmp_path, f'for i in $(seq 100); do echo "line $i"; done\necho "{output}"\nexit 3')
        log = tmp_path / "logs" / f"vllm-0-{attempt}.log"
        with refused("server_ended", "code 3", output, "line 72\n", name, log) as caught:
            start(tmp_path, folder, make_machine(servers__python=python))
        assert "line 71\n" not in caught.value.what
        remedies.add(caught.value.remedy)
    assert len(remedies) == len(LAST_WORDS)


LOGGED = "(EngineCore pid=7) ERROR 11-29 13:00:00 [core.py:1510] "
BETWEEN = "The above exception was the direct cause of the following exception:"
REFERS = """Traceback (most recent call last):
  File "/venv/vllm/v1/engine/utils.py", line 1431, in wait_for_engine_startup
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"""


def traceback(exception: str, code: str = "raise error") -> str:
    return (
        f'Traceback (most recent call last):\n  File "/venv/vllm/a.py", line 9, in f\n    {code}\n    ^^^^\n{exception}'
    )


def prefixed(prefix: str, text: str) -> str:
    return "\r\n".join(prefix + line for line in text.splitlines())


def engine_log(*tracebacks: str) -> str:
    """Return a log as vLLM 0.32 writes it: the engine logs its error and prints it again, then its API server ends."""
    error = f"\n\n{BETWEEN}\n\n".join(tracebacks)
    logged = prefixed(LOGGED, f"EngineCore failed to start.\n{error}")
    banner = "(APIServer pid=5) WARNING 11-29 12:59:00 [env.py:9] VLLM_CPU_KVCACHE_SPACE is not set\n"
    return f"{banner}{logged}\nProcess EngineCore:\n{error}\n{REFERS}"


def workers_log(exception: str) -> str:
    """Return the log of an engine with two workers, which fail at the same time."""
    prefixes = [f"(Worker_TP{rank} pid={rank}) ERROR 11-29 13:00:00 [multiproc_executor.py:871] " for rank in range(2)]
    shown = [prefixed(prefix, traceback(exception)).splitlines() for prefix in prefixes]
    together = "\n".join(line for pair in zip(*shown, strict=True) for line in pair)
    waits = (
        "WorkerProc initialization failed due to an exception in a background process. See stack trace for root cause."
    )
    return f"{together}\n{engine_log(traceback(f'Exception: {waits}'))}"


PROFILING = (
    "AssertionError: Error in memory profiling. Initial free memory 20.1 GiB, current free memory 60.5 GiB. This "
    "happens when other processes sharing the same container release GPU memory while vLLM is profiling."
)
INVALID = """pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, no such thing [type=value_error, input_value=ArgsKwargs((), {'model_co...}), input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error"""
NOTED = prefixed("(APIServer pid=5) WARNING 11-29 12:59:59 [env.py:1] ", traceback("ImportError: no package"))


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (engine_log(traceback(PROFILING)), PROFILING),
        (workers_log(PROFILING), PROFILING),
        (engine_log(traceback("KeyError: 'x'"), traceback("ValueError: no such x")), "ValueError: no such x"),
        (engine_log(traceback("AssertionError", "assert size % 2 == 0")), "AssertionError: assert size % 2 == 0"),
        (traceback(INVALID), f"{INVALID.splitlines()[0]}: Value error, no such thing"),
        (f"{NOTED}\n{engine_log(traceback('ValueError: no room'))}", "ValueError: no room"),
        ("INFO 11-29 13:00:00 [a.py:1] loading", ""),
    ],
    ids=["engine", "workers", "chain", "no message", "pydantic", "warning before", "no exception"],
)
def test_cause_is_the_exception_of_the_first_process_that_failed(log, cause):
    assert cause_of(log) == cause


def test_dead_server_error_shows_the_cause_instead_of_the_log_s_end(tmp_path, checkpoint):
    """The log names a variable for the KV cache, but the remedy follows from the cause."""
    (tmp_path / "log").write_text(engine_log(traceback(PROFILING)) + "\nend" * 100)
    python = script(tmp_path, f"cat {tmp_path}/log\nexit 1")
    with refused("server_ended", f"code 1 before it was ready: {PROFILING}") as caught:
        start(tmp_path, checkpoint("a"), make_machine(servers__python=python))
    assert "\n" not in caught.value.what
    assert "machine.servers.gpus" in caught.value.remedy and "KVCACHE" not in caught.value.remedy


@pytest.mark.slow
@pytest.mark.long
def test_cause_of_a_real_server(tmp_path):
    model = make_tiny_checkpoint("qwen2-vl", tmp_path / "model", seed=0)
    machine = make_machine(servers__python=Path(".venv-vllm/bin/python"), servers__arguments={"load_format": "pickles"})
    with refused("server_ended", "before it was ready: ValueError: Load format `pickles` is not supported") as caught:
        start(tmp_path, model, machine)
    assert "Traceback" not in caught.value.what


def test_starting_server_says_what_it_does(tmp_path, checkpoint):
    line = prefixed("(EngineCore pid=7) INFO 11-29 13:00:00 [loader.py:501] ", "Loading weights took 0.02 seconds")
    machine = make_machine(servers__python=script(tmp_path, f'echo "{line}"\nexec sleep 60'), ready_timeout=1.0)
    server = VllmServer(SETTINGS, machine, index=0, log_folder=tmp_path, api_key="secret")
    assert server.activity == ""
    with refused("server_not_ready"):
        asyncio.run(server.start(checkpoint("a")))
    assert server.activity == "Loading weights took 0.02 seconds"


def test_server_that_is_never_ready_is_stopped(tmp_path, checkpoint, monkeypatch):
    monkeypatch.chdir(tmp_path)
    python = script(tmp_path, "echo loading; echo $$ > pid; exec sleep 60")
    with refused("server_not_ready", "4 s", "loading", "ConnectError"):
        start(tmp_path, checkpoint("a"), make_machine(servers__python=python, ready_timeout=4.0))
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_error_for_a_used_port_names_its_owner(tmp_path, checkpoint):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        machine = make_machine(servers__python=script(tmp_path, "exit 1"), servers__arguments={"port": port - 1})
        with refused("server_port_in_use", port, f"process {os.getpid()}"):
            start(tmp_path, checkpoint("a"), machine, index=1)


@pytest.mark.parametrize(
    ("facts", "code", "shown"),
    [
        ({"servers__python": "no/python"}, "vllm_missing", ("no/python", "make")),
        ({"servers__environment": {"VLLM_CPU_KVCACHE_SPACE": "999999"}}, "server_memory_missing", ("999999 GiB",)),
    ],
    ids=["no environment", "too little memory"],
)
def test_rejects_unsuitable_machine_before_start(facts, code, shown, tmp_path, checkpoint):
    machine = make_machine(**({"servers__python": script(tmp_path, "exit 1")} | facts))
    with refused(code, *shown):
        start(tmp_path, checkpoint("a"), machine)


def test_rejects_folder_without_checkpoint(tmp_path):
    with refused("served_model_missing", tmp_path):
        start(tmp_path, tmp_path, make_machine(servers__python=script(tmp_path, "exit 1")))


def with_images_both_ways(folder: Path, **more: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"model_type": "molmo2", **more}))
    return folder


@pytest.mark.parametrize("model_type", ["molmo2", "gemma3"])
def test_rejects_image_attention_that_vllm_lacks(model_type, tmp_path, checkpoint):
    machine = make_machine(servers__python=script(tmp_path, f"touch {tmp_path}/started; sleep 9"), ready_timeout=4.0)
    folder = with_images_both_ways(checkpoint("a"), model_type=model_type)
    with refused("image_attention_on_cpu", folder / "config.json", 'model.image_attention = "causal"'):
        start(tmp_path, folder, machine)
    assert not (tmp_path / "started").exists()
    with refused("server_not_ready"):
        start(tmp_path, with_images_both_ways(folder, model_type=model_type, is_mm_prefix_lm=False), machine)
    assert (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("family", "path", "value"),
    [
        ("glm4v", "text_config.attention_bias", False),
        ("glm4v", "text_config.attention_bias", None),
        ("glm4v-moe", "text_config.tie_word_embeddings", True),
        ("glm4v-moe", "text_config.use_qk_norm", True),
        ("glm4v-moe", "text_config.use_qk_norm", None),
        ("qwen3-vl-moe", "text_config.norm_topk_prob", None),
        ("gemma4", "vision_config.default_output_length", None),
    ],
)
def test_rejects_config_without_what_vllm_needs(family, path, value, checkpoint):
    folder, family = checkpoint("a"), FAMILIES[family]
    config = {"model_type": family.model_type, "text_config": {}, "vision_config": {}}
    for needed in family.served_entries:
        part, name = needed.split(".")
        config[part][name] = 280 if family.served_entries[needed] is None else family.served_entries[needed]
    (folder / "config.json").write_text(json.dumps(config))
    server_command(folder, SETTINGS, Machine(), port=1, gpus=())
    part, name = path.split(".")
    config[part][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with refused("served_entry_missing", folder / "config.json", path):
        server_command(folder, SETTINGS, Machine(), port=1, gpus=())


def test_rejects_large_gemma4_on_cpu(checkpoint):
    folder, vision = checkpoint("a"), {"default_output_length": 280}
    for attention in ("vision", None):
        config = {"model_type": "gemma4", "vision_config": vision, "is_mm_prefix_lm": False}  # which vLLM does not read
        config["text_config"] = {"use_bidirectional_attention": attention}
        (folder / "config.json").write_text(json.dumps(config))
        with refused("image_attention_on_cpu", folder / "config.json") if attention else nullcontext():
            server_command(folder, SETTINGS, Machine(), port=1, gpus=())


def test_only_mixture_of_experts_returns_experts(checkpoint):
    folder, replaying = checkpoint("a"), SETTINGS.model_copy(update={"replay_experts": True})
    with refused("experts_missing", folder / "config.json", "inference.replay_experts"):
        server_command(folder, replaying, Machine(), port=1, gpus=())
    text = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    assert "--enable-return-routed-experts" in server_command(folder, replaying, Machine(), port=1, gpus=())
    assert expert_layout(folder) == (8, 3, 2)
    text = {"n_routed_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 46}  # GLM-4.5V's
    (folder / "config.json").write_text(json.dumps({"text_config": text}))
    assert expert_layout(folder) == (128, 46, 8)


def test_text_only_server_may_be_causal(checkpoint):
    text_only = SETTINGS.model_copy(update={"max_images_per_prompt": 0})
    command = server_command(with_images_both_ways(checkpoint("a")), text_only, Machine(), port=1, gpus=())
    assert "--attention-backend" not in command


def test_gpu_attention_backend_supports_the_checkpoint(checkpoint):
    def backend(folder: Path, **arguments: str) -> str | None:
        machine = make_machine(servers__gpus=((0,),), servers__arguments=arguments)
        return dict(pairwise(server_command(folder, SETTINGS, machine, port=1, gpus=(0,)))).get("--attention-backend")

    both_ways = with_images_both_ways(checkpoint("a"))
    causal = with_images_both_ways(checkpoint("b"), is_mm_prefix_lm=False)
    assert backend(both_ways) == "TRITON_ATTN"
    assert backend(both_ways, attention_backend="TRITON_ATTN") == "TRITON_ATTN"
    assert backend(causal) is None
    assert backend(causal, attention_backend="FLASH_ATTN") == "FLASH_ATTN"
    for other in ("FLASH_ATTN", "FLEX_ATTENTION"):
        with refused("image_attention_backend", other):
            backend(both_ways, attention_backend=other)


@pytest.mark.parametrize(
    "name", ["logprobs_mode", "generation-config", "host", "api_key", "max-model-len", "dtype", "quantization"]
)
def test_result_changing_arguments_come_only_from_settings(name, checkpoint):
    servers = MachineServers().model_copy(update={"arguments": {name: "x"}})  # a key is not even taken there
    machine = Machine(servers=servers)
    with refused("server_argument_reserved", f"machine.servers.arguments.{name}"):
        server_command(checkpoint("a"), SETTINGS, machine, port=1, gpus=())


def test_fp8_servers_exclude_the_vision_tower(checkpoint):
    settings = SETTINGS.model_copy(update={"dtype": "bfloat16", "quantization": "fp8"})
    machine = make_machine(servers__gpus=((0,),), weight_transfer="ipc", trainer__gpus=(0,))
    folder = checkpoint("a")
    pairs = dict(pairwise(server_command(folder, settings, machine, port=1, gpus=(0,))))
    assert pairs["--quantization"] == "fp8_per_channel"
    (pattern,) = json.loads(pairs["--quantization-config"])["ignore"]
    layers = {
        "language_model.model.layers.0.self_attn.qkv_proj": False,
        "model.layers.11.mlp.down_proj": False,
        "visual.blocks.0.mlp.gate_up_proj": True,
        "vision_tower.vision_model.encoder.layers.3.self_attn.out_proj": True,
        "model.vision_backbone.image_vit.transformer.0.attention.wqkv": True,
        "multi_modal_projector.linear_1": True,
        "visual.merger.mlp.0": True,
    }
    assert {name: re.match(pattern.removeprefix("re:"), name) is not None for name in layers} == layers
    for gpus, changes, adapters, name in (
        ((), {}, None, "machine.servers.gpus"),
        ((0,), {}, ServedAdapters(8), "model.lora.served_as"),
        ((0,), {"weight_transfer": "delta"}, None, "machine.servers.weight_transfer"),
    ):
        with refused("quantization_impossible", "inference.quantization", name):
            arguments = make_machine(machine, **changes)
            server_command(folder, settings, arguments, port=1, gpus=gpus, adapters=adapters)


@pytest.mark.parametrize(("gpus", "cached"), [((), False), ((0,), True)])
def test_states_of_linear_attention_are_not_cached_on_cpu(gpus, cached, tmp_path):
    """There vLLM could only cache them if it computed prompts in chunks, which ends its engine. It has no adapters."""
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5", "text_config": {"linear_num_key_heads": 2}}')
    command = server_command(tmp_path, SETTINGS, make_machine(), port=1234, gpus=gpus)
    assert ("--no-enable-prefix-caching" not in command) == cached
    if not gpus:
        with refused("adapters_not_served", tmp_path):
            server_command(tmp_path, SETTINGS, make_machine(), port=1234, gpus=gpus, adapters=ServedAdapters(8))


def test_server_command_and_environment(checkpoint):
    machine = make_machine(
        servers__gpus=((2, 3),), servers__arguments={"gpu_memory_utilization": 0.8, "enable_prefix_caching": False}
    )
    command = server_command(checkpoint("a"), SETTINGS, machine, port=1234, gpus=(2, 3))
    pairs = dict(pairwise(command))
    assert pairs["--host"] == "127.0.0.1"
    assert pairs["--logprobs-mode"] == "processed_logprobs"
    assert pairs["--generation-config"] == "vllm"
    assert pairs["--tensor-parallel-size"] == "2"
    assert pairs["--gpu-memory-utilization"] == "0.8"
    assert "--no-enable-prefix-caching" in command
    assert "--enforce-eager" not in command
    environment = server_environment(machine, api_key="secret", gpus=(2, 3))
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3" and "TORCH_COMPILE_DISABLE" not in environment
    assert environment["VLLM_API_KEY"] == "secret"
    assert environment["VLLM_HOST_IP"] == "127.0.0.1"
    assert (environment["GLOO_SOCKET_IFNAME"], environment["NCCL_SOCKET_IFNAME"]) == ("lo", "=lo")
    assert "secret" not in command


@pytest.mark.parametrize(("name", "value"), [("VLLM_API_KEY", {"env": "A_KEY"}), ("VLLM_SERVER_DEV_MODE", "0")])
def test_rejects_variables_that_the_pool_sets(name, value, tmp_path, checkpoint, monkeypatch):
    monkeypatch.setenv("A_KEY", "a key")
    python = script(tmp_path, f"touch {tmp_path}/started; sleep 9")
    machine = make_machine(servers__python=python, servers__environment={name: value}, ready_timeout=0.5)
    with refused("server_variable_reserved", f"machine.servers.environment.{name}"):
        start(tmp_path, checkpoint("a"), machine)
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_key_of_a_local_server_bypasses_proxies(variable, tmp_path, checkpoint, monkeypatch):
    stand_in = Path(__file__).with_name("stand_in.py")
    python = script(tmp_path, f'shift 2\nexec {sys.executable} {stand_in} "$@"')
    with socket.socket() as proxy:
        proxy.bind(("127.0.0.1", 0))
        proxy.listen()
        proxy.setblocking(False)
        monkeypatch.setenv(variable, f"http://127.0.0.1:{proxy.getsockname()[1]}")
        server = start(tmp_path, checkpoint("a"), make_machine(servers__python=python, ready_timeout=20))
        asyncio.run(server.stop())
        with pytest.raises(BlockingIOError):
            proxy.accept()


def test_free_port_is_outside_the_ephemeral_range(monkeypatch, tmp_path):
    """A server takes it 15 s after it was chosen, in which other programs connect."""
    connections = tmp_path / "ip_local_port_range"
    monkeypatch.setattr(host, "_CONNECTIONS", connections)
    connections.write_text("32768\t60999\n")
    assert all(20_000 <= free_port(None, "127.0.0.1") < 32_768 for _ in range(50))
    connections.write_text("20001\t60999\n")  # one is left
    assert free_port(None, "127.0.0.1") == 20_000
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 20_000))
        taken.listen()
        assert free_port(None, "127.0.0.1") > 20_000
    connections.write_text("1024\t65535\n")
    assert free_port(None, "127.0.0.1") > 0
    connections.unlink()
    assert free_port(None, "127.0.0.1") > 0


SERVED = Path(__file__).parents[2] / "components/inference/served"


async def answer(_: Request) -> PlainTextResponse:
    return PlainTextResponse("inside")


@pytest.mark.parametrize(
    ("path", "key", "status"),
    [
        ("/health", None, 200),
        ("/collective_rpc", None, 401),
        ("/collective_rpc", "Bearer wrong", 401),
        ("/collective_rpc", "right", 401),
        ("/collective_rpc", "Bearer right", 200),
        ("/v1/models", None, 401),
        ("/health/collective_rpc", None, 401),
    ],
)
async def test_every_route_needs_the_key(path, key, status, monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "right")
    monkeypatch.syspath_prepend(SERVED)
    require_key = importlib.import_module("armature_served.require_key")
    app = Starlette(routes=[Route("/{path:path}", answer)], middleware=[Middleware(require_key.RequireKey)])
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        response = await http.get(path, headers={"Authorization": key} if key else {})
    assert response.status_code == status
    assert ("inside" in response.text) == (status == 200)
