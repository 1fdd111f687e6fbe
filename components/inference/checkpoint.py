"""What a pool reads from a checkpoint folder without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from armature.components.artifacts.tensors import Tensors, read_tensors
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import read_bytes
from armature.components.contracts.machine import Machine, Scalar
from armature.components.inference.client import MODEL_NAME

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
        if machine.weight_transfer != "file":
            raise ConfigurationError(
                f"adapters reach the servers as files, and weight_transfer is {machine.weight_transfer!r}",
                code="adapters_need_files",
                where="machine.weight_transfer",
                remedy='leave it out, or set model.lora.served_as = "merged"',
            )


def served_name(adapter: Path) -> str:
    """What requests call the adapter in this folder, one of a series whose folders have different names.

    Each version has a name of its own: vLLM's prefix cache tells adapters apart by it, and a server that lost the
    version refuses the request. Loading in place under one name would have every batch read the files again.
    """
    return f"{MODEL_NAME}-{adapter.name}"
