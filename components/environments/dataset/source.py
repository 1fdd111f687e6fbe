"""Open the table that settings name: its format, its files or splits, and the folder of its images."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.contracts.digests import document_digest
from armature.components.contracts.episodes import Split
from armature.components.contracts.errors import ConfigurationError, DataError
from armature.components.contracts.files import is_folder
from armature.components.contracts.installation import original
from armature.components.environments.dataset.files import DataFiles, matches, open_folder
from armature.components.environments.dataset.huggingface import (
    SAVED,
    dataset_commit,
    hub_shards,
    refuse_no_revision,
    saved_shards,
)
from armature.components.environments.dataset.images import METADATA, SUFFIXES, image_shards
from armature.components.environments.dataset.settings import HashSplit, NameSplit, TableSettings
from armature.components.environments.dataset.shards import COPY, READERS, Shard
from armature.components.machine.hub import HUB, commit_of
from armature.components.machine.project import project_folder, project_path
from armature.components.machine.registry import nearest

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
}
SPLITS: tuple[Split, ...] = ("train", "heldout")


@dataclass(frozen=True)
class RowTable:
    """A table of rows in shards.

    `files` is the root of image paths. `digest` covers the rows' data, without images that are files. `has_splits` is
    True if the shards are the splits of a Hugging Face dataset.
    """

    files: DataFiles
    digest: str
    open_shards: Callable[[], list[Shard]]
    has_splits: bool = False

    @cached_property
    def shards(self) -> dict[str, Shard]:
        """The shards by name, in a fixed order."""
        return {shard.name: shard for shard in self.open_shards()}

    def splits(self, settings: TableSettings) -> dict[str, Split | None]:
        """Return the split of each shard to use; None means that the split is decided for each row.

        Raises:
            ConfigurationError: the settings name a shard that does not exist, or name one shard for both splits.
        """
        split = settings.split
        if isinstance(split, HashSplit) and split.of:
            return {name: None for pattern in split.of for name in self._named(pattern, "of")}
        if not isinstance(split, NameSplit):
            if self.has_splits and len(self.shards) > 1 and split.by == "hash":
                raise ConfigurationError(
                    f"the dataset has the splits {', '.join(self.shards)}",
                    code="split_not_chosen",
                    where="environment.args.split",
                    remedy='choose: split = {by = "name", train = ["train"], heldout = ["test"]}, or '
                    '{by = "hash", of = ["train"]}',
                )
            return dict.fromkeys(self.shards)
        split_of_shard: dict[str, Split | None] = {}
        for of in SPLITS:
            for pattern in getattr(split, of):
                names = self._named(pattern, of)
                if both := [name for name in names if split_of_shard.get(name, of) != of]:
                    raise ConfigurationError(
                        f"{both[0]!r} is named both for training and as held out",
                        code="split_overlap",
                        where="environment.args.split",
                        remedy="name it in one of train and heldout",
                    )
                split_of_shard |= dict.fromkeys(names, of)
        return split_of_shard

    def _named(self, pattern: str, key: str) -> list[str]:
        names = matches(pattern, list(self.shards))
        if not names:
            raise ConfigurationError(
                f"no file, folder or split of the source matches {pattern!r}",
                code="split_missing",
                where=f"environment.args.split.{key}",
                remedy=f"the source has {', '.join(list(self.shards)[:20])}",
            )
        return names


def open_table(settings: TableSettings) -> RowTable:
    """Return the table that `settings` name. Relative paths begin at the recipe's folder.

    Raises:
        ConfigurationError: the source's format is ambiguous, needs a package that is not installed, or is a hub name
            without a revision.
        DataError: the source does not exist or cannot be reached.
    """
    kind = settings.format or _detected_format(settings)
    is_hub = kind == "huggingface" and is_hub_name(settings)
    if not is_hub and (settings.revision is not None or settings.subset):
        raise ConfigurationError(
            "only a dataset of the hub has a revision and subsets",
            code="revision_unused",
            where=f"environment.args.source = {settings.source!r}",
        )
    if kind == "huggingface":
        return _huggingface(settings)
    base, pattern = _split_source(settings.source)
    root = open_folder(_absolute(settings.root) if settings.root else base)
    if kind == "images":
        if settings.root:
            raise ConfigurationError(
                "a folder of images is its own root", code="root_unused", where="environment.args.root"
            )
        files, names = root, root.names()
        described = [name for name in names if Path(name).name in METADATA]
        return RowTable(files, document_digest([files.digest(described), names]), lambda: image_shards(files))
    files = root if "://" in base and not settings.root else open_folder(base, links=True)
    names = _tables(files, pattern, settings.format)
    reader = READERS[kind]
    return RowTable(root, files.digest(names), lambda: [reader(files.path(name), name) for name in names])


def refuse_missing_source(settings: TableSettings) -> None:
    """Check that a source on this machine exists, and that a hub name has a revision. Nothing is read or fetched.

    Raises:
        ConfigurationError: a hub name has no revision.
        DataError: the file or folder does not exist, or no file matches the pattern.
    """
    if "://" in settings.source:
        return
    base, pattern = _split_source(settings.source)
    if not (pattern and _format(pattern)) and (settings.revision is not None or is_hub_name(settings)):
        refuse_no_revision(settings.source, settings.revision)
        return
    files = open_folder(base, links=True)
    if pattern and not (matches(pattern, files.names()) if _has_magic(pattern) else files.has(pattern)):
        raise _missing(files, pattern, sorted(each.name for each in Path(base).iterdir() if _format(each.name)))


def _missing(files: DataFiles, pattern: str, others: Sequence[str] = ()) -> DataError:
    """Return the error for a source without files, and suggest one of `others`, names of files in its folder."""
    near = nearest(pattern, others)
    return DataError(
        f"no file matches {pattern!r}",
        code="data_file_missing",
        where=str(files),
        remedy="name a file, a folder or a pattern that is there" + f"; did you mean {near!r}?" * bool(near),
    )


def _huggingface(settings: TableSettings) -> RowTable:
    if not is_hub_name(settings):
        place = Path(_absolute(settings.source))
        files = open_folder(str(place))
        root = open_folder(_absolute(settings.root)) if settings.root else files
        return RowTable(root, files.digest(files.names()), lambda: saved_shards(place), True)
    commit = dataset_commit(settings.source, settings.revision)
    root = open_folder(_absolute(settings.root or "."))
    name = settings.source
    return RowTable(root, f"{name}@{commit}", lambda: hub_shards(name, commit, settings.subset), True)


def is_hub_name(settings: TableSettings) -> bool:
    """Check if the source is the name of a dataset on the hub and not a file or folder beside the recipe."""
    name = settings.source
    return bool(HUB.fullmatch(name)) and not name.startswith(".") and not project_path(name).exists()


SettingsT = TypeVar("SettingsT", bound=TableSettings)


def table_at_commit(settings: SettingsT, say: Callable[[str], None]) -> SettingsT:
    """Return the settings with the commit in place of a branch or tag of a Hugging Face dataset.

    Raises:
        DataError: see `hub_commit`.
    """
    if settings.revision is None or not is_hub_name(settings):
        return settings
    return settings.model_copy(update={"revision": commit_of(settings.source, settings.revision, "dataset", say)})


def image_names(table: RowTable, used: Any, paths: Callable[[], Iterable[str]]) -> list[str]:
    """Return the distinct names of the images that are files, sorted.

    Finding them takes a pass over all rows, so the list is cached on disk.

    Args:
        used: a JSON document of the settings on which the names depend.
        paths: makes that pass, and yields a name for each image.
    """
    key = document_digest([COPY, table.digest, used])

    def write(path: Path) -> None:
        path.write_text(json.dumps(sorted(set(paths()))))

    names = make_once(DownloadCache.standard().folder / "tables" / f"{key}.images.json", write)
    return list(json.loads(names.read_text()))


def _detected_format(settings: TableSettings) -> str:
    """Return the source's format, from its name or the names of its files.

    Raises:
        ConfigurationError: there are no files of a format, or files of several.
        DataError: the source does not exist.
    """
    base, pattern = _split_source(settings.source)
    if pattern and (kind := _format(pattern)):
        return kind
    if settings.revision is not None or ("://" not in settings.source and is_hub_name(settings)):
        return "huggingface"
    files = open_folder(base)
    names = matches(pattern, files.names()) if pattern else files.names()
    if any(name in SAVED for name in names):
        return "huggingface"
    if any(Path(name).suffix.lower() in SUFFIXES for name in names):
        tables = [name for name in names if _format(name) and Path(name).name not in METADATA]
        if not tables:
            return "images"
    kinds = sorted({kind for name in names if (kind := _format(name))})
    if len(kinds) == 1:
        return kinds[0]
    files_found = (
        f"files of the formats {', '.join(kinds)}" if kinds else "no JSONL, JSON, CSV or Parquet files or images"
    )
    raise ConfigurationError(
        f"the source has {files_found}",
        code="format_unknown",
        where=f"environment.args.source = {settings.source!r}",
        remedy="name the files, as in data/*.parquet, or set environment.args.format",
    )


def _tables(files: DataFiles, pattern: str, kind: str | None) -> list[str]:
    if pattern and files.has(pattern):
        return [pattern]
    if not pattern:
        names = [name for name in files.names() if _format(name)]
    else:
        names = matches(pattern, files.names()) if _has_magic(pattern) else []
    if not names:
        raise _missing(files, pattern or str(kind))
    return names


def _format(name: str) -> str | None:
    return FORMATS.get(Path(name).suffix.lower())


def _absolute(source: str) -> str:
    return source if "://" in source else str(project_path(source))


def _split_source(source: str) -> tuple[str, str]:
    """Return a source's folder or URL, and the name or glob below it, which is "" for the whole folder.

    A relative source begins at the recipe's folder. The name of that folder, and a file or folder whose name equals
    the source's text literally, are not read as globs.
    """
    if "://" in source:
        return _split_url(source)
    place = project_path(source)
    if is_folder(place):
        return str(place), ""
    here = project_folder()
    base = here if place == here / source else original(here)
    names = list(Path(source).parts)
    while len(names) > 1 and (not _has_magic(names[0]) or is_folder(base / names[0])):
        base /= names.pop(0)
    return str(base), "/".join(names)


def _split_url(url: str) -> tuple[str, str]:
    """Return the same as `_split_source` for a URL. Only the scheme `file` can be checked for existing folders."""
    scheme, _, rest = url.partition("://")
    is_here = is_folder if scheme == "file" else lambda _: False
    if is_here(rest) or not (_has_magic(rest) or _format(url)):
        return url, ""
    names = rest.split("/")
    plain = 0
    while plain < len(names) - 1 and (not _has_magic(names[plain]) or is_here("/".join(names[: plain + 1]))):
        plain += 1
    return f"{scheme}://{'/'.join(names[:plain])}", "/".join(names[plain:])


def _has_magic(text: str) -> bool:
    return re.search(r"[*?\[]", text) is not None
