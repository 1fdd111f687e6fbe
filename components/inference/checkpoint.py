"""What a pool reads from a checkpoint folder without loading it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from components.contracts.errors import DataError

_PLACEHOLDERS = (
    *(f"{kind}_token_{suffix}" for kind in ("image", "video", "audio") for suffix in ("id", "index")),
    *(f"vision_{edge}_token_id" for edge in ("start", "end")),
    *(f"{edge}_token_{suffix}" for edge in ("boi", "eoi") for suffix in ("id", "index")),
)

_PREFIX_TYPES = frozenset({"bagel", "gemma3", "molmo2", "moondream3", "paligemma"})

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def read_config(folder: Path) -> dict[str, object]:
    """`config.json` of a checkpoint. Raises DataError if there is none."""
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError("not a checkpoint: no config.json", where=str(folder), remedy="give its folder") from None
    except ValueError as error:
        raise DataError(f"config.json is not JSON: {error}", where=str(path), remedy="save it again") from error
    if not isinstance(config, dict):
        raise DataError("config.json is not an object", where=str(path), remedy="save it again")
    return config


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


def attends_both_ways(config: Mapping[str, object]) -> bool:
    """Whether tokens of one image see each other in both directions, as vLLM reads it out of a `config.json`."""
    return bool(config.get("is_mm_prefix_lm", config.get("model_type") in _PREFIX_TYPES))


def read_tensors(folder: Path) -> Tensors:
    """Name -> (dtype, shape) of every tensor in the safetensors files, from their headers alone.

    Raises:
        DataError: there are none, or a header cannot be read (a file that is still being written).
    """
    tensors: Tensors = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise DataError("no *.safetensors files", where=str(folder), remedy="save the checkpoint there first")
    for path in files:
        try:
            with path.open("rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length)) if 0 < length <= path.stat().st_size else None
        except ValueError as error:
            raise DataError(f"unreadable header: {error}", where=str(path), remedy="save it again") from error
        if header is None:
            raise DataError("not a safetensors file", where=str(path), remedy="save it again")
        end = 8 + length
        for name, entry in header.items():
            if name != "__metadata__":
                tensors[name] = (entry["dtype"], tuple(entry["shape"]))
                end = max(end, 8 + length + entry["data_offsets"][1])
        if path.stat().st_size != end:
            raise DataError(
                f"{path.stat().st_size} bytes where the header promises {end}", where=str(path), remedy="save it again"
            )
    return tensors
