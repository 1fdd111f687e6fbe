"""Special tokens of a model: texts that its tokenizer reads as one token with a special meaning, such as an image."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from armature.components.artifacts.cache import DownloadCache
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes
from armature.components.families.family import FAMILIES, tiny_recipe
from armature.components.machine.hub import hub_commit
from armature.components.models.gguf import model_source
from armature.components.models.settings import ModelSettings
from armature.components.models.source import check_source_name, fetch_files, locate

LARGEST_FILE = 2**28
"""Largest tokenizer or configuration file that is read, in bytes."""
TOKENIZER, TOKENIZER_CONFIG, SPECIAL, ADDED = FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
)
"""Names of the files that can list added tokens. A tokenizer has some of these files."""


@dataclass(frozen=True)
class AddedToken:
    """A text that the tokenizer always reads as one token. `special`: it marks structure, such as the end of a turn."""

    text: str
    special: bool
    id: int | None = None


def added_tokens(folder: Path) -> list[AddedToken]:
    """Return the added tokens of the tokenizer in `folder`. A token that several files list is returned several times.

    The files are read without loading the tokenizer.

    Raises:
        DataError: a file is not one that a tokenizer saves.
    """
    tokens: list[AddedToken] = []
    for name in FILES:
        if (folder / name).is_file():
            try:
                tokens += _tokens_in_file(name, json.loads(read_bytes(folder / name, LARGEST_FILE)))
            except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError, OSError) as error:
                raise DataError(
                    f"not a file of a tokenizer: {type(error).__name__}: {str(error)[:200]}",
                    code="tokenizer_unreadable",
                    where=str(folder / name),
                    remedy="save the tokenizer again",
                ) from error
    return [token for token in tokens if token.text]


def _tokens_in_file(name: str, document: dict[str, Any]) -> Iterator[AddedToken]:
    """Yield the added tokens that one tokenizer file lists."""
    if name == ADDED:
        yield from (AddedToken(text, False, int(number)) for text, number in document.items())
    elif name == TOKENIZER:
        for each in document.get("added_tokens") or ():
            yield AddedToken(str(each["content"]), bool(each.get("special")), int(each["id"]))
    else:
        for number, each in (document.get("added_tokens_decoder") or {}).items():
            yield AddedToken(str(each["content"]), bool(each.get("special")), int(number))
        for key, value in document.items():
            if key.endswith(("_token", "_tokens")):
                yield from (AddedToken(text, True) for text in _texts(value))


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts of a token as transformers saves it: a text, a dict with its `content`, or lists and dicts of
    these."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict) and "content" in value:
        yield str(value["content"])
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


CONFIG = "config.json"


def reserved_tokens(settings: ModelSettings, *, images_only: bool) -> tuple[str, ...]:
    """Return the model's special tokens, sorted.

    For a hub model only the tokenizer's files are fetched, not the weights.

    Args:
        images_only: return only tokens that stand for images and videos.

    Raises:
        ConfigurationError: a hub name has no revision.
        DataError: the folder or repository does not exist, or a tokenizer file is damaged.
    """
    if settings.tiny_family is not None:
        vocabulary = tiny_recipe(settings.tiny_family).vocabulary
        special = {*vocabulary.markers, *vocabulary.inputs_only}
        images = special.intersection(FAMILIES[settings.tiny_family].image_tokens)
    else:
        folder = _tokenizer_folder(settings)
        config, added = _read_config(folder), added_tokens(folder)
        kinds = [family for family in FAMILIES.values() if family.model_type == config.get("model_type")]
        names = {"image_token_id", "image_token_index", "video_token_id", *(kind.placeholder for kind in kinds)}
        places = {number for name in names if isinstance(number := config.get(name), int)}
        images = {token.text for token in added if token.id in places}
        images |= {token.text for token in added}.intersection(text for kind in kinds for text in kind.image_tokens)
        special = {token.text for token in added if token.special} | images
    return tuple(sorted(images if images_only else special))


def _tokenizer_folder(settings: ModelSettings) -> Path:
    """Return the folder with the tokenizer's files, given a folder, an artifact or a hub name."""
    source = model_source(settings.source)
    if Path(source).is_dir():
        return locate(source)
    check_source_name(source, settings.revision)
    commit = hub_commit(source, str(settings.revision), "model").commit
    with suppress(LocalEntryNotFoundError):
        whole = Path(snapshot_download(source, revision=commit, local_files_only=True))
        if (whole / CONFIG).is_file() and any((whole / name).is_file() for name in FILES):
            return whole
    # Do not use the hub's cache: a snapshot there would later pass for a complete one with weights.
    target = DownloadCache.standard().folder / "tokenizers" / commit
    return fetch_files("model's tokenizer", source, commit, allow_patterns=[CONFIG, *FILES], local_dir=target)


def _read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        DataError: the file is missing or is not a JSON object.
    """
    remedy = "name a folder with a config.json of a vision-language model, or a hub name with its revision"
    try:
        config = json.loads(read_bytes(folder / CONFIG, LARGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"no model configuration can be read: {error}",
            code="model_config_unreadable",
            where=str(folder),
            remedy=remedy,
        ) from error
    if not isinstance(config, dict):
        raise DataError(
            "config.json is not an object", code="model_config_unreadable", where=str(folder / CONFIG), remedy=remedy
        )
    return config
