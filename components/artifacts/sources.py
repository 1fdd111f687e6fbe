"""Digests of everything a result depends on besides settings: Python code, files and versions of packages."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import sha256
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from armature.components.artifacts.cache import file_sha256
from armature.components.contracts.digests import document_digest
from armature.components.contracts.errors import ConfigurationError
from armature.components.machine.project import project_path

# --- The digest of a module's code ---

OURS = "armature"
"""Name of this project's package. Only its environments and rewards enter digests, and only if they are imported; its
stages have versions instead."""
ENVIRONMENTS_HERE, REWARDS_HERE = "armature.components.environments", "armature.components.rewards"
INSTALLED = ("site-packages", "dist-packages")
"""Names of folders into which installers put packages."""
SMALL = 2**20
"""Size in bytes below which a file is hashed again each time. The digests of larger files are cached."""

_digests: dict[str, tuple[ModuleSpec | None, str]] = {}
"""Cache of code digests by module name, each with the module's spec. A module that stays loaded keeps its digest."""


def code_digest(module: str) -> str:
    """SHA-256 of the code that `module` depends on: its file, its package, and everything not installed that these
    import.

    All Python files of a package count, and data files whose names appear in its code. Nothing is imported to compute
    the digest. The digest describes the code loaded in this process: an edit counts from the next process on, or when
    the module is loaded again.

    Raises:
        ConfigurationError: the module has no file.
    """
    spec = _spec(module)
    if module in _digests and _digests[module][0] is spec and module in sys.modules:
        return _digests[module][1]
    digest = document_digest({name: _file_digest(path) for name, path in sorted(_files(module).items())})
    _digests[module] = (spec, digest)
    return digest


def has_code(module: str) -> bool:
    """True if the module exists and is a file."""
    spec = _spec(module)
    return spec is not None and spec.origin is not None and Path(spec.origin).is_file()


def _files(module: str) -> dict[str, Path]:
    """Return every file that enters the digest of `module`. The keys are names that are the same on every machine."""
    files: dict[str, Path] = {}
    seen: set[str] = set()
    packages: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen or not _enters_digest(name, module):
            continue
        seen.add(name)
        spec = _spec(name)
        if not has_code(name) or spec is None or spec.origin is None:
            if name == module:
                raise ConfigurationError(
                    f"the code of module {name!r} cannot be found",
                    code="module_code_missing",
                    remedy="correct its name, or write it as a file beside the recipe or, for a program, in its folder",
                )
            continue
        path = Path(spec.origin)
        files[name] = path
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        # A whole package counts if it is not ours, or if it is the package of one of our environments.
        ours = package.partition(".")[0] == OURS and not package.startswith(f"{ENVIRONMENTS_HERE}.")
        whole = package != "" and not ours
        if whole and package not in packages:
            packages.add(package)
            below = [each.relative_to(path.parent) for each in _walk(path.parent) if each.suffix == ".py"]
            waiting += [".".join([package, *each.with_suffix("").parts]).removesuffix(".__init__") for each in below]
            files |= {f"{package}/{each.as_posix()}": path.parent / each for each in below}
        if path.suffix == ".py":
            imported, texts = _imports_and_texts(path, package)
            waiting += imported
            files |= {f"{name}:{text}": file for text, file in _named_files(texts, path.parent, whole)}
    return files


def _enters_digest(name: str, start: str) -> bool:
    """True if the module `name` enters the digest of the module `start`."""
    top = name.partition(".")[0]
    if top == OURS:
        return name.startswith((f"{ENVIRONMENTS_HERE}.", f"{REWARDS_HERE}.")) or name == start
    if top == start.partition(".")[0]:
        return True
    if top in sys.stdlib_module_names:
        return False
    spec = _spec(top)
    return spec is not None and spec.origin is not None and not _installed(Path(spec.origin))


def _installed(file: Path) -> bool:
    """True if an installer put the file there, into an environment or by `pip install --target`."""
    home = file.parent.parent if file.stem == "__init__" else file.parent
    name = file.parent.name if file.stem == "__init__" else file.name
    return bool(set(file.parts) & set(INSTALLED)) or name in _recorded(home)


@cache
def _recorded(home: Path) -> frozenset[str]:
    """Return the names of files and folders directly in `home` that belong to installed distributions, according to the
    distributions' RECORD files."""
    lists = (record.read_text(errors="replace").splitlines() for record in home.glob("*.dist-info/RECORD"))
    return frozenset(line.partition(",")[0].partition("/")[0] for lines in lists for line in lines)


def _spec(name: str) -> ModuleSpec | None:
    """Find a module's spec without importing its parent packages."""
    if name in sys.modules:
        return sys.modules[name].__spec__
    parent, _, _ = name.rpartition(".")
    if not parent:
        try:
            return find_spec(name)
        except (ImportError, ValueError):
            return None
    above = _spec(parent)
    places = above.submodule_search_locations if above else None
    try:
        return PathFinder.find_spec(name, list(places)) if places else None
    except KeyError:  # a namespace package inside a package that is not imported
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(place, name.rpartition(".")[2])) for place in places or ()]
        return spec


def _imports_and_texts(path: Path, package: str) -> tuple[list[str], set[str]]:
    """Return the names of all modules that a file may import, and all strings in its code."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # importing the file fails as well; its bytes still count
        return [], set()
    imported: list[str] = []
    texts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute_name(node, package)
            imported += [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 256:
            texts.add(node.value)
    return imported, texts


def _absolute_name(node: ast.ImportFrom, package: str) -> str:
    """Return the absolute name of the module in `from ... import`, or an empty string if it leaves the package."""
    name = node.module or ""
    try:
        return resolve_name("." * node.level + name, package or None) if node.level else name
    except ImportError:
        return ""


def _named_files(texts: set[str], folder: Path, below: bool) -> Iterator[tuple[str, Path]]:
    """Yield the files whose paths relative to `folder` are among `texts`, each after its name. With `below`, also yield
    every file anywhere below `folder` whose file name is among `texts`."""
    for text in sorted(texts):
        if "\0" not in text and not text.startswith(("/", "~")) and _is_file(folder / text):
            yield text, folder / text
    if below:
        for path in _walk(folder):
            if path.name in texts:
                yield path.relative_to(folder).as_posix(), path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the text is too long for a file name
        return False


def _walk(folder: Path) -> Iterator[Path]:
    """Yield all files below `folder` except hidden files, caches and virtual environments."""
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if not name.startswith("."))


def _file_digest(path: Path) -> str:
    """Return the SHA-256 of a file. For a large file it may come from the cache."""
    return sha256(path.read_bytes()).hexdigest() if path.stat().st_size < SMALL else file_sha256(path)


# --- Digests of files that arguments name, and versions of packages ---

LONGEST_PATH = 4096


def named_files(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return one digest of all files and folders whose paths appear among `arguments`, as `{"data": digest}`. Return {}
    if no path appears.

    A text counts as a path if it contains a slash or has a suffix, so that a word is not taken for a folder of that
    name.
    """
    digests = {}
    for where, text in _texts(arguments, ""):
        path = project_path(text)
        if path.is_file() and ("/" in text or path.suffix):
            digests[where] = file_sha256(path)
        elif path.is_dir() and "/" in text:
            files = sorted(each for each in path.rglob("*") if each.is_file())
            digests[where] = document_digest({each.relative_to(path).as_posix(): file_sha256(each) for each in files})
    return {"data": document_digest(digests)} if digests else {}


def versions(*distributions: str) -> dict[str, str]:
    """Return the version of each distribution, by name. The version is an empty string if the distribution is not
    installed."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return {name: installed(name) for name in distributions}


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield every string within nested mappings and lists, with its location such as `.files[0]`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{where}[{index}]")
    elif isinstance(value, str) and 0 < len(value) < LONGEST_PATH and "\0" not in value:
        yield where, value
