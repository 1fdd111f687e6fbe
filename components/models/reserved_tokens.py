"""Texts that a model reads as one token with a meaning of its own: an image's place, the end of a turn."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError

from armature.components.artifacts.cache import DownloadCache
from armature.components.contracts.errors import DataError
from armature.components.contracts.files import read_bytes
from armature.components.families.family import FAMILIES, tiny_recipe
from armature.components.hub import hub_commit
from armature.components.models.settings import ModelSettings
from armature.components.models.source import fetch_files, locate, refuse_unnamed
from armature.components.project import project_source
from armature.components.sources.special_tokens import FILES, LARGEST_FILE, added_tokens

CONFIG = "config.json"


def reserved_tokens(settings: ModelSettings, *, images_only: bool) -> tuple[str, ...]:
    """The special tokens of the model, sorted; `images_only`: only those that stand for images and videos.

    Of a model of the hub the tokenizer's files are fetched, and no weights.

    Raises:
        ConfigurationError: a hub name without a revision.
        DataError: there is no such folder or repository, or a file of the tokenizer is damaged.
    """
    if settings.tiny_family is not None:
        vocabulary = tiny_recipe(settings.tiny_family).vocabulary
        special = {*vocabulary.markers, *vocabulary.inputs_only}
        images = special.intersection(FAMILIES[settings.tiny_family].image_tokens)
    else:
        folder = _tokenizer_folder(settings)
        config, added = _config(folder), added_tokens(folder)
        kinds = [family for family in FAMILIES.values() if family.model_type == config.get("model_type")]
        names = {"image_token_id", "image_token_index", "video_token_id", *(kind.placeholder for kind in kinds)}
        places = {number for name in names if isinstance(number := config.get(name), int)}
        images = {token.text for token in added if token.id in places}
        images |= {token.text for token in added}.intersection(text for kind in kinds for text in kind.image_tokens)
        special = {token.text for token in added if token.special} | images
    return tuple(sorted(images if images_only else special))


def _tokenizer_folder(settings: ModelSettings) -> Path:
    """The folder with the tokenizer of a folder, an artifact or a hub name."""
    source = project_source(settings.source)
    if Path(source).is_dir():
        return locate(source)
    refuse_unnamed(source, settings.revision)
    commit = hub_commit(source, str(settings.revision), "model").commit
    with suppress(LocalEntryNotFoundError):
        whole = Path(snapshot_download(source, revision=commit, local_files_only=True))
        if (whole / CONFIG).is_file() and any((whole / name).is_file() for name in FILES):
            return whole
    # Not in the hub's own cache: a snapshot there is taken for a whole one, with weights.
    target = DownloadCache.standard().folder / "tokenizers" / commit
    return fetch_files("model's tokenizer", source, commit, allow_patterns=[CONFIG, *FILES], local_dir=target)


def _config(folder: Path) -> dict[str, Any]:
    """
    Raises:
        DataError: there is none, or it is not an object.
    """
    remedy = "give a folder with a config.json of a vision-language model, or a hub name with its revision"
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
