"""Digests of what results depend on besides settings: code, files and versions of packages."""

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

# The digest of a module's code: its own file, its package, and what they import of what is not installed.
#
# Nothing is imported to find it out. Of a package all Python files count, and data files that they name.

OURS = "armature"
"""The package of this project. Its environments and rewards count by what they import; the stages have versions."""
ENVIRONMENTS_HERE, REWARDS_HERE = "armature.components.environments", "armature.components.rewards"
INSTALLED = ("site-packages", "dist-packages")
SMALL = 2**20

_known: dict[str, tuple[ModuleSpec | None, str]] = {}


def code_digest(module: str) -> str:
    """SHA-256 over the code that `module` stands on, as it is when it is first asked for.

    That is the code which this process has loaded: an edit counts from the next process on, or when the module is
    loaded again.

    Raises:
        ConfigurationError: the module has no file.
    """
    spec = _spec(module)
    if module in _known and _known[module][0] is spec and module in sys.modules:
        return _known[module][1]
    digest = document_digest({name: _content(path) for name, path in sorted(_files(module).items())})
    _known[module] = (spec, digest)
    return digest


def has_code(module: str) -> bool:
    """Whether there is such a module, in a file."""
    spec = _spec(module)
    return spec is not None and spec.origin is not None and Path(spec.origin).is_file()


def _files(module: str) -> dict[str, Path]:
    """Every file that counts, by a name that is the same on every machine."""
    files: dict[str, Path] = {}
    seen: set[str] = set()
    packages: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in seen or not _counts(name, module):
            continue
        seen.add(name)
        spec = _spec(name)
        if not has_code(name) or spec is None or spec.origin is None:
            if name == module:
                raise ConfigurationError(
                    f"the code of module {name!r} cannot be found",
                    code="module_code_missing",
                    remedy="keep it in a file",
                )
            continue
        path = Path(spec.origin)
        files[name] = path
        package = name if spec.submodule_search_locations else name.rpartition(".")[0]
        whole = package != "" and _of_one_environment(package)
        if whole and package not in packages:
            packages.add(package)
            below = [each.relative_to(path.parent) for each in _walk(path.parent) if each.suffix == ".py"]
            waiting += [".".join([package, *each.with_suffix("").parts]).removesuffix(".__init__") for each in below]
            files |= {f"{package}/{each.as_posix()}": path.parent / each for each in below}
        if path.suffix == ".py":
            imported, texts = _read(path, package)
            waiting += imported
            files |= {f"{name}:{text}": found for text, found in _named(texts, path.parent, whole)}
    return files


def _of_one_environment(package: str) -> bool:
    """Whether all of the package belongs to the environments in it."""
    return package.partition(".")[0] != OURS or package.startswith(f"{ENVIRONMENTS_HERE}.")


def _counts(name: str, start: str) -> bool:
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
    """Whether an installer put the module there: into an environment, or by `pip install --target`."""
    home = file.parent.parent if file.stem == "__init__" else file.parent
    name = file.parent.name if file.stem == "__init__" else file.name
    return bool(set(file.parts) & set(INSTALLED)) or name in _recorded(home)


@cache
def _recorded(home: Path) -> frozenset[str]:
    """What the installers' lists of files name, directly in `home`."""
    lists = (record.read_text(errors="replace").splitlines() for record in home.glob("*.dist-info/RECORD"))
    return frozenset(line.partition(",")[0].partition("/")[0] for lines in lists for line in lines)


def _spec(name: str) -> ModuleSpec | None:
    """Where the module is; its parents are not imported."""
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
    except KeyError:  # a package without __init__ in one that is not imported
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(Path(place, name.rpartition(".")[2])) for place in places or ()]
        return spec


def _read(path: Path, package: str) -> tuple[list[str], set[str]]:
    """The modules that a file imports, and those that they may be, and its texts."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # importing it fails as well; its bytes count
        return [], set()
    imported: list[str] = []
    texts: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, package)
            imported += [base, *(f"{base}.{alias.name}" for alias in node.names)] if base else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 256:
            texts.add(node.value)
    return imported, texts


def _absolute(node: ast.ImportFrom, package: str) -> str:
    name = node.module or ""
    try:
        return resolve_name("." * node.level + name, package or None) if node.level else name
    except ImportError:
        return ""


def _named(texts: set[str], folder: Path, below: bool) -> Iterator[tuple[str, Path]]:
    """Files that the texts name, in `folder` or, by their bare names, anywhere below it."""
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
    except OSError:  # a text that is too long for a name
        return False


def _walk(folder: Path) -> Iterator[Path]:
    """Files below `folder`; hidden ones, caches and virtual environments are left out."""
    for parent, folders, names in os.walk(folder):
        here = Path(parent)
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".") and name != "__pycache__" and not (here / name / "pyvenv.cfg").exists()
        )
        yield from (here / name for name in sorted(names) if not name.startswith("."))


def _content(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest() if path.stat().st_size < SMALL else file_sha256(path)


# Digests of what is read: files that arguments name, and versions of packages.

LONGEST_PATH = 4096


def named_files(arguments: Mapping[str, Any]) -> dict[str, str]:
    """The digest of what lies in the files and folders whose paths are among `arguments`; nothing if none is.

    A path is a text with a slash or a suffix, so that a word is not taken for a folder that happens to be here.
    """
    found = {}
    for where, text in _texts(arguments, ""):
        path = project_path(text)
        if path.is_file() and ("/" in text or path.suffix):
            found[where] = file_sha256(path)
        elif path.is_dir() and "/" in text:
            files = sorted(each for each in path.rglob("*") if each.is_file())
            found[where] = document_digest({each.relative_to(path).as_posix(): file_sha256(each) for each in files})
    return {"data": document_digest(found)} if found else {}


def versions(*distributions: str) -> dict[str, str]:
    """The versions of installed distributions; "" of one that is not."""

    def installed(name: str) -> str:
        try:
            return version(name)
        except PackageNotFoundError:
            return ""

    return {name: installed(name) for name in distributions}


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{where}[{index}]")
    elif isinstance(value, str) and 0 < len(value) < LONGEST_PATH and "\0" not in value:
        yield where, value
