"""The command line and environment of a vLLM server, and the facts that a pool reads from a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from armature.components.artifacts.tensors import Tensors, read_tensors
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.machine import Machine, Scalar
from armature.components.families.family import FAMILIES
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
    """Read `config.json` of a checkpoint. Raises DataError if it is missing or invalid."""
    path = folder / "config.json"
    try:
        config = json.loads(read_bytes(path))
    except FileNotFoundError:
        raise DataError(
            "not a checkpoint: the folder has no config.json",
            code="not_a_checkpoint",
            where=str(folder),
            remedy="pass the folder of a checkpoint",
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
    """Return the most tokens that the model has positions for; 2**31 if its configuration does not say."""
    return _first_integer(read_config(folder), "max_position_embeddings")


def _first_integer(config: Mapping[str, object], key: str) -> int:
    """Return the integer at `key` in `text_config`, or else at the top level of `config`. Return `_ANY` if both lack
    it."""
    parts = (config.get("text_config"), config)
    values = [part.get(key) for part in parts if isinstance(part, Mapping)]
    return next((value for value in values if isinstance(value, int)), _ANY)


def placeholder_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the sorted ids of the placeholder tokens for images, videos and audio, and of the tokens that mark their
    start and end. A policy must never sample them."""
    config = read_config(folder)
    return tuple(sorted({value for key in _PLACEHOLDERS if isinstance(value := config.get(key), int)}))


def sampled_token_ids(folder: Path, token_ids: Iterable[int]) -> tuple[int, ...]:
    """Return, sorted, the `token_ids` that have a row in the output head. vLLM rejects a logit bias for other ids.

    For example, Molmo2's output head has no rows for its image tokens, so these cannot be sampled anyway.
    """
    config = read_config(folder)
    text = config.get("text_config")
    rows = text.get("vocab_size") if isinstance(text, dict) else None
    return tuple(sorted({token for token in token_ids if not isinstance(rows, int) or token < rows}))


def vocabulary(folder: Path) -> tuple[int, int]:
    """Return two counts: token ids that can be sampled (rows of the output head), and token ids that a prompt can
    contain (rows of the embedding).

    A count is 2**31 if the checkpoint does not say. Raises DataError as `read_tensors` does.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    rows = _first_integer(config, "vocab_size")
    embedding = sum(_rows(tensors, name) for name in _EMBEDDINGS) or rows
    return _rows(tensors, "lm_head.weight") or min(rows, embedding), embedding


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names that families give to the number of experts in a layer."""


def expert_layout(folder: Path) -> tuple[int, int, int]:
    """Return how many experts a layer has, how many layers the language model has, and how many experts a token uses.

    Raises:
        ConfigurationError: the checkpoint is not a mixture of experts.
    """
    config = read_config(folder)
    experts = min(_first_integer(config, name) for name in _EXPERTS)
    layers, chosen = (_first_integer(config, name) for name in ("num_hidden_layers", "num_experts_per_tok"))
    if experts == _ANY or chosen == _ANY:
        raise ConfigurationError(
            f"config.json has no number of experts ({', '.join(_EXPERTS)})",
            code="experts_missing",
            where=f"inference.replay_experts, {folder / 'config.json'}",
            remedy="leave it out",
        )
    return experts, layers, chosen


def has_experts(config: Mapping[str, object]) -> bool:
    """Return True if a `config.json` describes a mixture of experts."""
    return any(_first_integer(config, name) not in (0, _ANY) for name in _EXPERTS)


def _rows(tensors: Tensors, name: str) -> int:
    """Return the number of rows of the tensor called `name`, with or without a prefix; 0 if there is no such tensor."""
    shapes = [shape for full, (_, shape) in tensors.items() if full == name or full.endswith(f".{name}")]
    return max((shape[0] for shape in shapes if shape), default=0)


def attends_both_ways(config: Mapping[str, object]) -> bool:
    """Return True if the tokens of one image attend to each other bidirectionally, by the rules that vLLM applies to a
    `config.json`."""
    if config.get("model_type") == "gemma4":
        text = config.get("text_config")
        return isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    return bool(config.get("is_mm_prefix_lm", config.get("model_type") in _PREFIX_TYPES))


def has_state(config: Mapping[str, object]) -> bool:
    """Return True if a `config.json` describes a model with linear attention, which passes a state from token to
    token."""
    text = config.get("text_config")
    return isinstance(text, Mapping) and "linear_num_key_heads" in text


# --- LoRA adapters, which servers hold beside the weights that they were started with ---

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM (0.26 to 0.32) accepts for max-lora-rank."""


@dataclass(frozen=True)
class ServedAdapters:
    """The LoRA adapters that servers must be able to load.

    Attributes:
        rank: largest rank.
        vision: True if layers of the vision tower and the projector have adapters too.

    Example:
        >>> ServedAdapters(rank=20).arguments()
        {'enable-lora': True, 'max-lora-rank': 32}
    """

    rank: int
    vision: bool = False

    def arguments(self) -> dict[str, Scalar]:
        """Return the command-line arguments that make vLLM accept these adapters.

        Raises:
            ConfigurationError: vLLM does not accept adapters of this rank.
        """
        room = next((rank for rank in _RANKS if rank >= self.rank), None)
        if room is None:
            raise ConfigurationError(
                f"vLLM accepts adapters of rank {_RANKS[-1]} at most, not {self.rank}",
                code="adapter_rank_too_large",
                where="model.lora.rank",
                remedy='lower it, or set model.lora.served_as = "merged"',
            )
        towers: dict[str, Scalar] = {"enable-tower-connector-lora": True} if self.vision else {}
        return {"enable-lora": True, "max-lora-rank": room, **towers}

    def check(self, machine: Machine) -> None:
        """Check that `machine` sends weights to its servers as files, the only way to send adapters.

        Raises:
            ConfigurationError: `machine.servers.weight_transfer` sends whole weights.
        """
        if machine.servers.weight_transfer != "file":
            raise ConfigurationError(
                f"adapters are sent to servers as files, but weight_transfer is {machine.servers.weight_transfer!r}",
                code="adapters_need_files",
                where="machine.servers.weight_transfer",
                remedy='leave it out, or set model.lora.served_as = "merged"',
            )


def served_name(adapter: Path) -> str:
    """Return the model name of the adapter in this folder. Folders of different versions must have different names.

    Each version needs its own name, because vLLM's prefix cache distinguishes adapters by name. Also, a server that has
    lost a version then rejects requests for it. If all versions shared one name and were loaded in place, every batch
    would read the files again.
    """
    return f"{MODEL_NAME}-{adapter.name}"


BOTH_WAYS = "TRITON_ATTN"
"""Name of the vLLM attention backend in which the tokens of an image attend to each other bidirectionally, as in the
trainer.

vLLM claims the same for FLEX_ATTENTION, but its log-probs differed from the trainer's by 0.1 nats (vLLM 0.26). vLLM
0.32 selects other backends by default.
"""

_NOT_TEXT = "re:.*(visual|vision|vit|projector|adapter|merger).*"
"""Pattern of the names of layers that are not quantized. They belong to vision towers, whose widths are not all
supported by 8-bit kernels."""

_RESERVED_ARGUMENTS = {
    "model": "the pool's weights",
    "served_model_name": "the pool",
    "host": "the pool: servers listen on loopback, or on the address of their node",
    "api_key": "the environment variable VLLM_API_KEY",
    "middleware": "the pool",
    "logprobs_mode": "the pool: anything but processed_logprobs biases importance ratios",
    "generation_config": "the pool: a checkpoint's own top_k or penalties would bias importance ratios",
    "max_model_len": "inference.max_model_len",
    "limit_mm_per_prompt": "inference.max_images_per_prompt and max_videos_per_prompt",
    "dtype": "inference.dtype",
    "enable_return_routed_experts": "inference.replay_experts",
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
    """Return the command that serves `model` on the IP address `address` and `port`, with `adapters` if any.

    Raises:
        DataError: `model` is not a checkpoint.
        ConfigurationError: `machine.servers.arguments` has a reserved argument, vLLM would compute another model than
            the checkpoint's, or it cannot serve the adapters or the quantization.
    """
    arguments: dict[str, Scalar] = {
        "model": str(model),
        "served-model-name": MODEL_NAME,
        "host": address,
        "port": port,
        "dtype": settings.dtype,
        "max-model-len": settings.max_model_len,
        "limit-mm-per-prompt": json.dumps(
            {"image": settings.max_images_per_prompt, "video": settings.max_videos_per_prompt}
        ),
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
            # Compute in the engine's process. This takes half the CPU time of handing every step to a worker process,
            # which spins while it waits, and saves the start of one interpreter.
            "distributed-executor-backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
            # Prefill prompts in one piece: a seeded request whose prompt is prefilled in chunks ends the engine on CPU
            # (vLLM 0.32, "CPU Generator does not use offset").
            "enable-chunked-prefill": False,
            "max-num-batched-tokens": max(8192, settings.max_model_len),
        }
        if has_state(read_config(model)):
            if adapters is not None:
                raise ConfigurationError(
                    "vLLM on a CPU serves no adapters of a model with linear attention",
                    code="adapters_not_served",
                    where=str(model / "config.json"),
                    remedy='set model.lora.served_as to "merged", or serve on GPUs (machine.servers.gpus)',
                )
            # vLLM (0.32) caches states at the ends of blocks only, for which it computes prompts in chunks.
            arguments["enable-prefix-caching"] = False
    _check_entries(model)
    if settings.replay_experts:
        expert_layout(model)
        arguments["enable-return-routed-experts"] = True
    if settings.max_images_per_prompt and attends_both_ways(read_config(model)):
        arguments["attention-backend"] = _prefix_backend(model, machine, gpus)
    if settings.max_videos_per_prompt and not takes_videos(model):
        raise ConfigurationError(
            "models of this family are not shown videos",
            code="video_unsupported",
            where="inference.max_videos_per_prompt",
            remedy="show frames as images and leave it out, or choose a family with videos: docs/models.md",
        )
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
        if name in _RESERVED_ARGUMENTS:
            raise ConfigurationError(
                f"servers.arguments cannot set {key!r}: it comes from {_RESERVED_ARGUMENTS[name]}",
                code="server_argument_reserved",
                where=f"machine.servers.arguments.{key}",
                remedy="remove it",
            )
        if name != "port":
            arguments[name.replace("_", "-")] = value
    command = [str(machine.server_interpreter), "-m", "vllm.entrypoints.openai.api_server"]
    for name, value in arguments.items():
        command += [f"--{name}", str(value)] if not isinstance(value, bool) else [f"--{'' if value else 'no-'}{name}"]
    return command


def _check_entries(model: Path) -> None:
    """Check that `config.json` has what vLLM needs of the model's family; see `Family.served_entries`.

    Raises:
        ConfigurationError: an entry is missing or has another value.
    """
    config = read_config(model)
    entries = [family.served_entries for family in FAMILIES.values() if family.model_type == config.get("model_type")]
    for path, needed in (entry for each in entries for entry in each.items()):
        part, name = path.split(".")
        values = config.get(part)
        value = values.get(name) if isinstance(values, Mapping) else None
        if value is None or needed not in (None, value):
            raise ConfigurationError(
                f"vLLM does not compute this model as transformers does if {path} is {json.dumps(value)}",
                code="served_entry_missing",
                where=str(model / "config.json"),
                remedy="write the value of the released checkpoint into the file; transformers omits it in a new "
                "configuration" + (f". Only {json.dumps(needed)} can be served" if needed is not None else ""),
            )


def takes_videos(model: Path) -> bool:
    """Check that the checkpoint in the folder `model` is of a family with videos."""
    kind = read_config(model).get("model_type")
    return any(each.model_type == kind and each.images and each.images.videos for each in FAMILIES.values())


def _refuse_quantization(machine: Machine, gpus: tuple[int, ...], adapters: ServedAdapters | None) -> None:
    why = ""
    if not gpus:
        why, remedy = "vLLM cannot multiply in 8 bits on CPU", "serve on GPUs (machine.servers.gpus)"
    elif adapters is not None:
        why, remedy = "adapters are trained with base weights in 16 bits", 'set model.lora.served_as to "merged"'
    elif machine.servers.weight_transfer == "delta":
        why, remedy = "deltas are changes of weights in 16 bits", "choose another machine.servers.weight_transfer"
    if why:
        remedy += ", or leave it out"
        raise ConfigurationError(why, code="quantization_impossible", where="inference.quantization", remedy=remedy)


def _prefix_backend(model: Path, machine: Machine, gpus: tuple[int, ...]) -> str:
    """Return the vLLM backend that computes bidirectional attention within images. Other backends are silently causal.

    Raises:
        ConfigurationError: the server runs on CPU, or `machine.servers.arguments` selects another backend.
    """
    if not gpus:
        raise ConfigurationError(
            "the tokens of an image attend to each other bidirectionally in this checkpoint, but vLLM's attention on "
            "CPU is causal: its log-probs would not be the trainer's",
            code="image_attention_on_cpu",
            where=str(model / "config.json"),
            remedy='train and serve it causal (model.image_attention = "causal"; not Gemma 4), serve it on a GPU '
            "(machine.servers.gpus), or send no images (inference.max_images_per_prompt = 0)",
        )
    chosen = {key.replace("-", "_"): value for key, value in machine.servers.arguments.items()}
    backend = chosen.get("attention_backend", BOTH_WAYS)
    if backend != BOTH_WAYS:
        raise ConfigurationError(
            "the tokens of an image attend to each other bidirectionally in this checkpoint, but the backend "
            f"{backend} computes this differently from the trainer or not at all",
            code="image_attention_backend",
            where="machine.servers.arguments.attention_backend",
            remedy=f"leave it out; the default is {BOTH_WAYS}",
        )
    return BOTH_WAYS


_RESERVED_VARIABLES = {
    "VLLM_API_KEY": "VLLM_API_KEY of the run itself, or is generated",
    "VLLM_SERVER_DEV_MODE": "the pool, which needs it to change weights",
}


def server_environment(
    machine: Machine,
    *,
    api_key: str,
    gpus: tuple[int, ...],
    deterministic: bool = False,
    adapters: ServedAdapters | None = None,
) -> dict[str, str | None]:
    """Return the environment variables that a server gets in addition to this process's. The value None removes one.

    The API key is passed here because `ps` shows command lines.

    Raises:
        ConfigurationError: `machine.servers.environment` sets a reserved variable.
    """
    if reserved := sorted(_RESERVED_VARIABLES.keys() & machine.servers.environment.keys()):
        raise ConfigurationError(
            f"servers.environment cannot set {reserved[0]}: it comes from {_RESERVED_VARIABLES[reserved[0]]}",
            code="server_variable_reserved",
            where=f"machine.servers.environment.{reserved[0]}",
            remedy="remove it",
        )
    environment: dict[str, str | None] = {
        "VLLM_API_KEY": api_key,
        "VLLM_SERVER_DEV_MODE": "1",  # enables the routes that reload weights and reset caches
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",  # the default of 5 s may close a connection just as we write on it
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "OTEL_PYTHON_TRACER_PROVIDER": None,  # names a package of our environment that the server's lacks
        "HF_HUB_OFFLINE": "1",
        VISIBLE: ",".join(map(str, gpus)) if machine.server_bundle else visible_devices(gpus),
        # The engine and its workers connect over further ports. By default they listen on the address of the hostname,
        # which other machines can reach.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": loopback(),
        "NCCL_SOCKET_IFNAME": f"={loopback()}",
    }
    if not gpus:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # Do not pin threads: they would share a core with the trainer's threads while another core is idle.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": str(machine.server_threads),
            # vLLM compiles a few functions of its sampler even in eager mode. That adds 12 s to the first request with
            # a C++ compiler, or 3 s with a warm cache, and changes neither bits nor speed.
            "TORCH_COMPILE_DISABLE": "1",
        }
        if deterministic:
            environment["VLLM_CPU_ATTN_SPLIT_KV"] = "0"  # also makes our plug-in encode each image alone
    if adapters is not None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"  # enables the routes that load adapters
    if machine.servers.weight_transfer == "ipc":
        environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # IPC handles are sent as pickles
    return environment | machine.server_variables()


def is_deterministic(settings: ServerSettings, machine: Machine) -> bool:
    """Return True if servers are started so that the same seed gives the same run.

    Raises:
        ConfigurationError: `inference.deterministic` is true where this is impossible.
    """
    obstacle = ""
    if machine.gpus_of_server(0):
        obstacle = "on GPUs the choice of a kernel depends on the batch size (machine.servers.gpus)"
    elif settings.dtype != "float32":
        obstacle = f"in {settings.dtype} the choice of a kernel depends on the batch size (inference.dtype)"
    if settings.deterministic and obstacle:
        raise ConfigurationError(
            f"the same seed would not give the same run: {obstacle}",
            code="determinism_impossible",
            where="inference.deterministic = true",
            remedy="leave it out, or serve on CPU in float32",
        )
    if settings.deterministic is None:
        return not obstacle and not machine.joins_servers
    return settings.deterministic
