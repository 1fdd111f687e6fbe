"""The folder of the recipe that this process works for: its relative paths begin there, and its own modules lie there.

A process has one, and its child processes have the same, by a variable of the environment. Without that, it is the
working folder: a recipe that is installed has nothing beside it.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import original

VARIABLE = "ARMATURE_PROJECT"


def project_folder() -> Path:
    return Path(os.environ.get(VARIABLE, ""))


def project_path(path: str | Path) -> Path:
    """A path of a recipe: a relative one begins at the recipe's folder.

    In a copy that DVC made, what git and DVC did not put there is where the repository has it.
    """
    found = project_folder() / path
    return found if os.path.exists(found) else original(found)  # noqa: PTH110 (any text may be asked about)


def project_source(name: str) -> str:
    """A folder or a hub name: the path of the folder, if the recipe's folder has it."""
    path = project_path(name)
    return str(path) if os.path.isdir(path) else name  # noqa: PTH112 (any text may be asked about)


def use_project(folder: str) -> None:
    """Make `folder` the one of this process and its children. A step of a deployment, before its flow is loaded."""
    os.environ[VARIABLE] = str(Path(folder).resolve())


@contextmanager
def project(folder: Path | None) -> Iterator[None]:
    """Work for a recipe in `folder`; None: for one that is installed."""
    before = os.environ.pop(VARIABLE, None)
    try:
        if folder is not None:
            use_project(str(folder))
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


# Python that a recipe names as "module:attribute": in a file beside the recipe, or installed.
#
# What lies beside the recipe is found without being installed, and is not on the import path: only the modules that
# are named, and those beside them that they import, can be imported. None of them may have the name of another module.


def load_object(name: str, noun: str) -> Any:
    """What "module:attribute" stands for; `noun` says in errors what it is.

    Raises:
        ConfigurationError: there is no such module or attribute, it cannot be imported, or a module beside the recipe
            has the name of another one.
    """
    module, _, attribute = name.partition(":")
    try:
        found = load_module(module)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            folder, top = project_folder().resolve(), module.partition(".")[0]
            wanted = f"{top}/__init__.py" if (folder / top).is_dir() else f"{module.replace('.', '/')}.py"
            raise ConfigurationError(
                f"{noun} {name!r}: there is no module {module!r}",
                code="module_missing",
                where=str(folder),
                remedy=f"write {wanted} beside the recipe, or install the package that has it",
            ) from error
        raise ConfigurationError(
            f"{noun} {name!r} cannot be loaded: {type(error).__name__}: {error}",
            code="name_not_loadable",
            where=_place(error) or name,
            remedy="correct the module, or install what it imports",
        ) from error
    if not attribute or not hasattr(found, attribute):
        raise ConfigurationError(
            f"{noun} {name!r}: module {module!r} has no {attribute or 'name after the colon'!r}",
            code="name_not_in_module",
            where=str(found.__file__),
            remedy="write MODULE:NAME with a name that the module defines",
        )
    return getattr(found, attribute)


def load_module(name: str) -> ModuleType:
    """The module, from beside the recipe if it is there.

    Raises:
        ConfigurationError: another module has the name of one beside the recipe.
        Exception: whatever importing it raises.
    """
    find_module(name)
    return importlib.import_module(name)


def find_module(name: str) -> None:
    """From now on the module can be imported and its code found, if it is beside the recipe; nothing is imported.

    Raises:
        ConfigurationError: another module has the name of one beside the recipe.
    """
    _FINDER.enter(project_folder().resolve(), name.partition(".")[0])


class _Source(SourceFileLoader):
    """Reads the source itself: bytecode is told from its source by size and whole seconds, which an edit may keep."""

    def path_stats(self, path: Any) -> NoReturn:
        raise OSError("no bytecode is kept")


class _BesideTheRecipe(MetaPathFinder):
    """Finds `names` in `folder`, and what is in packages there."""

    def __init__(self) -> None:
        self.folder, self.names = Path(), set[str]()
        self._versions: dict[Path, object] = {}

    def enter(self, folder: Path, name: str) -> None:
        """From now on find `name` in `folder`, if it is there, with all that it imports there.

        What was found before is imported again if the folder is another, or if a file has changed.
        """
        if folder != self.folder or any(_version(file) != known for file, known in self._versions.items()):
            for module in [each for each in sys.modules if each.partition(".")[0] in self.names]:
                del sys.modules[module]
            self.folder, self.names, self._versions = folder, set(), {}
        if name in self.names or _beside(folder, name) is None:
            return
        found, waiting = set[str](), [name]
        while waiting:
            each = waiting.pop()
            if each in found or (path := _beside(folder, each)) is None:
                continue
            _refuse_collision(each, path)
            found.add(each)
            inside = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
            files = [file for file in inside if file.is_file()]
            self._versions |= {file: _version(file) for file in files}
            waiting += [imported for file in files for imported in _imported(file)]
        importlib.invalidate_caches()
        self.names |= found
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in self.names:
            return None
        for place in [str(self.folder)] if path is None else path:
            finder = FileFinder(place, (_Source, [".py"]))
            if spec := finder.find_spec(fullname):
                return spec
        return None


_FINDER = _BesideTheRecipe()


def _beside(folder: Path, name: str) -> Path | None:
    """The file of the top-level module; a folder is one if it has `__init__.py`."""
    places = (folder / name / "__init__.py", folder / f"{name}.py")
    return next((path for path in places if path.is_file()), None)


def _refuse_collision(name: str, path: Path) -> None:
    """
    Raises:
        ConfigurationError: Python has another module of that name.
    """
    other = _elsewhere(name, path)
    if other:
        raise ConfigurationError(
            f"module {name!r} beside the recipe has the name of another module, which is {other}",
            code="module_name_taken",
            where=str(path),
            remedy=f"rename it, for example to my_{name}{path.suffix if path.stem == name else ''}",
        )


def _elsewhere(name: str, path: Path) -> str:
    """Where Python has a module `name` that is not at `path`; "" if it has none."""
    if name in sys.stdlib_module_names:
        return "Python's own"
    loaded = sys.modules.get(name)
    specs = [loaded.__spec__] if loaded else [f.find_spec(name, None) for f in sys.meta_path if f is not _FINDER]
    for spec in filter(None, specs):
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
        for place in places:
            # A folder `name` beside the recipe, on the import path, is none where `name.py` is.
            if place and Path(place).resolve() not in (path.resolve(), path.resolve().with_suffix("")):
                return f"in {place}"
    return ""


def _version(file: Path) -> object:
    """What changes with the file."""
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _imported(file: Path) -> Iterator[str]:
    """The top-level modules that a file imports, wherever in it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # importing it says so
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _place(error: BaseException) -> str:
    """File and line where importing failed, if that is beside the recipe."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    found, trace = "", error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).is_relative_to(_FINDER.folder):
            found = f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return found
