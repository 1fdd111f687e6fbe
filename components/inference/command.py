"""The command line and environment of one vLLM server, and what a pool reads from a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from armature.components.artifacts.tensors import Tensors, read_tensors
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.machine import Machine, Scalar, available_cpus
from armature.components.inference.client import MODEL_NAME
from armature.components.inference.settings import ServerSettings
from armature.components.machine.network import loopback
from armature.components.machine.resources import VISIBLE, visible_devices

_PLACEHOLDERS = (
    *(f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")),
    *(f"vision_{edge}_token_id" for edge in ("start", "end")),
    *(f"{edge}_token_{suffix}" for edge in ("boi", "eoi") for suffix in ("id", "index")),
)

_ANY = 2**31
_EMBEDDINGS = ("embed_tokens.weight", "wte.embedding", "wte.new_embedding")

_PREFIX_TYPES = frozenset({"bagel", "gemma3", "molmo2", "moondream3", "paligemma"})


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a checkpoint. Raises DataError if there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise DataError(
            "not a checkpoint: no config.json", code="not_a_checkpoint", where=str(folder), remedy="give its folder"
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"config.json is not JSON: {error}", code="model_config_invalid", where=str(path), remedy="save it again"
        ) from error
    if not isinstance(config, dict):
        raise DataError(
            "config.json is not an object", code="model_config_invalid", where=str(path), remedy="save it again"
        )
    return config


def longest_sequence(folder: Path) -> int:
    """Tokens that the model has positions for; not more than int32 holds where the checkpoint does not say it."""
    config = read_config(folder)
    parts = (config.get("text_config"), config)
    said = [part.get("max_position_embeddings") for part in parts if isinstance(part, dict)]
    return next((value for value in said if isinstance(value, int)), _ANY)


def placeholder_token_ids(folder: Path) -> tuple[int, ...]:
    """Ids that stand for images, videos or their edges, sorted: a policy must never sample them."""
    config = read_config(folder)
    return tuple(sorted({value for key in _PLACEHOLDERS if isinstance(value := config.get(key), int)}))


def sampled_token_ids(folder: Path, token_ids: Iterable[int]) -> tuple[int, ...]:
    """Those of `token_ids`, sorted, that the output head has a row for: vLLM refuses to be told of others.

    Molmo2's image tokens are beyond the head, so nothing can sample them.
    """
    config = read_config(folder)
    text = config.get("text_config")
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    return tuple(sorted({token for token in token_ids if not isinstance(rows, int) or token < rows}))


def vocabulary(folder: Path) -> tuple[int, int]:
    """How many ids can be sampled, and how many can be in a prompt: rows of the output head and of the embedding.

    Not more than int32 holds where the checkpoint does not say it. Raises DataError as `read_tensors` does.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    text = config.get("text_config")
    said = [part.get("vocab_size") for part in (text, config) if isinstance(part, dict)]
    rows = next((value for value in said if isinstance(value, int)), _ANY)
    embedding = sum(_rows(tensors, name) for name in _EMBEDDINGS) or rows
    return _rows(tensors, "lm_head.weight") or min(rows, embedding), embedding


def _rows(tensors: Tensors, name: str) -> int:
    """Of the tensor whose name ends so; 0: there is none."""
    shapes = [shape for full, (_, shape) in tensors.items() if full == name or full.endswith(f".{name}")]
    return max((shape[0] for shape in shapes if shape), default=0)


def attends_both_ways(config: Mapping[str, object]) -> bool:
    """Whether tokens of one image attend to each other bidirectionally, as vLLM reads it out of a `config.json`."""
    return bool(config.get("is_mm_prefix_lm", config.get("model_type") in _PREFIX_TYPES))


# Low-rank adapters that servers hold beside the weights that they were started with.

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM (0.26 to 0.32) makes room for."""


@dataclass(frozen=True)
class ServedAdapters:
    """What the servers of a pool have to make room for.

    rank: the largest of an adapter.
    vision: whether layers of the vision tower and the projector have adapters as well.
    """

    rank: int
    vision: bool = False

    def arguments(self) -> dict[str, Scalar]:
        """Of vLLM's command line.

        Raises:
            ConfigurationError: vLLM takes no adapters of this rank.
        """
        room = next((rank for rank in _RANKS if rank >= self.rank), None)
        if room is None:
            raise ConfigurationError(
                f"vLLM takes adapters of rank {_RANKS[-1]} at most, not {self.rank}",
                code="adapter_rank_too_large",
                where="model.lora.rank",
                remedy='lower it, or set model.lora.served_as = "merged"',
            )
        towers: dict[str, Scalar] = {"enable-tower-connector-lora": True} if self.vision else {}
        return {"enable-lora": True, "max-lora-rank": room, **towers}

    def check(self, machine: Machine) -> None:
        """
        Raises:
            ConfigurationError: whole weights are to be sent between GPUs.
        """
        if machine.servers.weight_transfer != "file":
            raise ConfigurationError(
                f"adapters reach the servers as files, and weight_transfer is {machine.servers.weight_transfer!r}",
                code="adapters_need_files",
                where="machine.servers.weight_transfer",
                remedy='leave it out, or set model.lora.served_as = "merged"',
            )


def served_name(adapter: Path) -> str:
    """What requests call the adapter in this folder, one of a series whose folders have different names.

    Each version has a name of its own: vLLM's prefix cache tells adapters apart by it, and a server that lost the
    version refuses the request. Loading in place under one name would have every batch read the files again.
    """
    return f"{MODEL_NAME}-{adapter.name}"


BOTH_WAYS = "TRITON_ATTN"
"""The attention backend that lets the tokens of an image attend to each other bidirectionally, as trainers do.

vLLM says the same of FLEX_ATTENTION, whose log-probs were 0.1 nats away (0.26), and chooses others by itself (0.32).
"""

_NOT_TEXT = "re:.*(visual|vision|vit|projector|adapter|merger).*"
"""Layers that stay as they are: those of vision towers, some of whose widths no product in 8 bits takes."""

_OURS = {
    "model": "the pool's weights",
    "served_model_name": "the pool",
    "host": "the pool: servers listen on loopback, or on the address of their node",
    "api_key": "the environment variable VLLM_API_KEY",
    "middleware": "the pool",
    "logprobs_mode": "the pool: anything but processed_logprobs biases importance ratios",
    "generation_config": "the pool: a checkpoint's own top_k or penalties would bias importance ratios",
    "max_model_len": "inference.max_model_len",
    "limit_mm_per_prompt": "inference.max_images_per_prompt",
    "dtype": "inference.dtype",
    "quantization": "inference.quantization",
    "quantization_config": "inference.quantization",
    "tensor_parallel_size": "machine.servers.gpus, or machine.cluster.servers",
    "weight_transfer_config": "machine.servers.weight_transfer",
    "worker_extension_cls": "machine.servers.weight_transfer",
}


def server_command(
    model: Path,
    settings: ServerSettings,
    machine: Machine,
    *,
    port: int,
    gpus: tuple[int, ...],
    adapters: ServedAdapters | None = None,
    address: str = "127.0.0.1",
) -> list[str]:
    """The command that serves `model` on `address`, an IP address, and `port`, with room for `adapters`.

    Raises:
        DataError: `model` is not a checkpoint.
        ConfigurationError: `machine.servers.arguments` names something that is set elsewhere, or vLLM would attend
            to images otherwise than the checkpoint, or takes no such adapters.
    """
    arguments: dict[str, Scalar] = {
        "model": str(model),
        "served-model-name": MODEL_NAME,
        "host": address,
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "limit-mm-per-prompt": json.dumps({"image": settings.max_images_per_prompt, "video": 0}),
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "seed": 0,
        "middleware": "armature_served.require_key.RequireKey",
        "allowed-origins": "[]",
        "disable-fastapi-docs": True,
        "disable-uvicorn-access-log": True,
        "disable-log-stats": True,
        "uvicorn-log-level": "warning",
    }
    if gpus:
        arguments["tensor-parallel-size"] = len(gpus)
    else:
        arguments |= {
            "enforce-eager": True,
            # The engine computes in its own process: half the CPU time of handing every step to a worker that
            # spins while it waits, and one interpreter less to start.
            "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            # A seeded request whose prompt is prefilled in pieces ends the engine on CPU (vLLM 0.32, "CPU
            # Generator does not use offset"), so prompts are prefilled whole.
            "enable-chunked-prefill": False,
            "max-num-batched-tokens": max(8192, settings.max_model_len),
        }
    if settings.max_images_per_prompt and attends_both_ways(read_config(model)):
        arguments["attention-backend"] = _prefix_backend(model, machine, gpus)
    if settings.quantization is not None:
        _refuse_quantization(machine, gpus, adapters)
        ignored = json.dumps({"ignore": [_NOT_TEXT]})
        arguments |= {"quantization": f"{settings.quantization}_per_channel", "quantization-config": ignored}
    if adapters is not None:
        arguments |= adapters.arguments()
    if machine.servers.weight_transfer == "delta":
        arguments["worker-extension-cls"] = "armature_served.versions.Versions"
    elif machine.servers.weight_transfer != "file":
        arguments["weight-transfer-config"] = json.dumps({"backend": machine.servers.weight_transfer})
    for key, value in machine.servers.arguments.items():
        name = key.replace("-", "_")
        if name in _OURS:
            raise ConfigurationError(
                f"servers.arguments may not set {key!r}: it comes from {_OURS[name]}",
                code="server_argument_reserved",
                where=f"machine.servers.arguments.{key}",
                remedy="take it out",
            )
        if name != "port":
            arguments[name.replace("_", "-")] = value
    command = [str(machine.server_interpreter), "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{name}"]
    return command


def _refuse_quantization(machine: Machine, gpus: tuple[int, ...], adapters: ServedAdapters | None) -> None:
    why = ""
    if not gpus:
        why, remedy = "vLLM has no products in 8 bits on CPU", "serve on GPUs (machine.servers.gpus)"
    elif adapters is not None:
        why, remedy = "adapters are trained beside weights of 16 bits", 'set model.lora.served_as to "merged"'
    elif machine.servers.weight_transfer == "delta":
        why, remedy = "changes are of weights of 16 bits", "choose another machine.servers.weight_transfer"
    if why:
        remedy += ", or leave it out"
        raise ConfigurationError(why, code="quantization_impossible", where="inference.quantization", remedy=remedy)


def _prefix_backend(model: Path, machine: Machine, gpus: tuple[int, ...]) -> str:
    """The backend for a checkpoint whose images are attended to both ways: another one is silently causal."""
    if not gpus:
        raise ConfigurationError(
            "the tokens of an image attend to each other bidirectionally in this checkpoint, but vLLM's attention on "
            "CPU is causal: its log-probs would not be the trainer's",
            code="image_attention_on_cpu",
            where=str(model / "config.json"),
            remedy='train and serve it causal (model.image_attention = "causal"), serve it on a GPU '
            "(machine.servers.gpus), or send no images (inference.max_images_per_prompt = 0)",
        )
    chosen = {key.replace("-", "_"): value for key, value in machine.servers.arguments.items()}
    backend = chosen.get("attention_backend", BOTH_WAYS)
    if backend != BOTH_WAYS:
        raise ConfigurationError(
            "the tokens of an image attend to each other bidirectionally in this checkpoint, but not, or not as in the "
            f"trainer, with {backend}",
            code="image_attention_backend",
            where="machine.servers.arguments.attention_backend",
            remedy=f"leave it out: it is then {BOTH_WAYS}",
        )
    return BOTH_WAYS


_OUR_VARIABLES = {
    "VLLM_API_KEY": "VLLM_API_KEY of the run itself, or is made for it",
    "VLLM_SERVER_DEV_MODE": "the pool: without it, weights cannot be changed",
}


def server_environment(
    machine: Machine,
    *,
    api_key: str,
    gpus: tuple[int, ...],
    deterministic: bool = False,
    adapters: ServedAdapters | None = None,
) -> dict[str, str | None]:
    """The variables to add to ours; None takes one away. The key travels here, not where `ps` shows it.

    Raises:
        ConfigurationError: `machine.servers.environment` sets one that the pool depends on.
    """
    if taken := sorted(_OUR_VARIABLES.keys() & machine.servers.environment.keys()):
        raise ConfigurationError(
            f"servers.environment may not set {taken[0]}: it comes from {_OUR_VARIABLES[taken[0]]}",
            code="server_variable_reserved",
            where=f"machine.servers.environment.{taken[0]}",
            remedy="take it out",
        )
    environment: dict[str, str | None] = {
        "VLLM_API_KEY": api_key,
        "VLLM_SERVER_DEV_MODE": "1",  # the routes that reload weights and reset caches
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # by default 5 s: a kept connection may close as we write on it
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OTEL_PYTHON_TRACER_PROVIDER": None,  # one of our environment, which theirs does not have
        "HF_HUB_OFFLINE": "1",
        VISIBLE: ",".join(map(str, gpus)) if machine.server_bundle else visible_devices(gpus),
        # Its engine and its workers meet over ports of their own: by default on the address of the host's name.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": f"={loopback()}",
    }
    if not gpus:
        # Half of the cores: the HTTP front, the environments and the trainer need theirs. With a tiny model on
        # two cores, one thread answers ten times as much as two, which wait for each other.
        bundle = machine.server_bundle
        threads = machine.threads or (
            bundle.num_cpus if bundle else max(1, available_cpus() // (2 * machine.servers.count))
        )
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Pinned threads would share a core with the trainer's while another core is idle.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(threads),
            # vLLM compiles a few functions of its sampler even when it runs eagerly: of the first request's time 12 s
            # with a C++ compiler, 3 s with what that left in a cache, for the same bits at the same speed.
            "TORCH_COMPILE_DISABLE": "1",
        }
        if deterministic:
            environment["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # our plug-in then also encodes each image alone
    if adapters is not None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # the routes that load adapters
    if machine.servers.weight_transfer == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # the handles travel as pickles
    return environment | machine.server_variables()


def is_deterministic(settings: ServerSettings, machine: Machine) -> bool:
    """Whether the servers are run so that the same seed gives the same run.

    Raises:
        ConfigurationError: `inference.deterministic` is true where it cannot be promised.
    """
    obstacle = ""
    if machine.gpus_of_server(0):
        obstacle = "kernels on GPUs are chosen by the size of the batch (machine.servers.gpus)"
    elif settings.dtype != "float32":
        obstacle = f"products in {settings.dtype} are chosen by the size of the batch (inference.dtype)"
    if settings.deterministic and obstacle:
        raise ConfigurationError(
            f"the same seed would not give the same run: {obstacle}",
            code="determinism_impossible",
            where="inference.deterministic = true",
            remedy="leave it out; it holds on CPU in float32",
        )
    if settings.deterministic is None:
        return not obstacle and not machine.joins_servers
    return settings.deterministic
