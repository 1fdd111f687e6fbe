"""What a pool reads from a checkpoint folder without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from armature.components.artifacts.tensors import Tensors, read_tensors
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes

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
