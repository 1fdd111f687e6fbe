"""The project folder: the folder of the current recipe, with its relative paths and its own Python modules.

A process has one project folder, and its child processes inherit it through an environment variable. Without this
variable it is the working folder, as for installed recipes, which have no files of their own.
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

from armature.components.contracts.errors import ConfigurationError, InvalidName
from armature.components.contracts.installation import original

VARIABLE = "ARMATURE_PROJECT"


def project_folder() -> Path:
    """Return the folder of the current recipe."""
    return Path(os.environ.get(VARIABLE, ""))


def project_path(path: str | Path) -> Path:
    """Resolve a path of a recipe; relative paths refer to the recipe's folder.

    In a temporary copy made by DVC, a file that is not in the copy is taken from the original repository.
    """
    local = project_folder() / path
    return local if os.path.exists(local) else original(local)  # noqa: PTH110 (any text may be asked about)


def project_source(name: str) -> str:
    """Return the path of the folder `name` if the recipe's folder has it; otherwise `name`, a name on the hub."""
    path = project_path(name)
    return str(path) if os.path.isdir(path) else name  # noqa: PTH112 (any text may be asked about)


def use_project(folder: str) -> None:
    """Set the project folder of this process and its children. Deployments do this before the flow is loaded."""
    os.environ[VARIABLE] = str(Path(folder).resolve())


@contextmanager
def project(folder: Path | None) -> Iterator[None]:
    """Set the project folder within the block; None: an installed recipe."""
    before = os.environ.pop(VARIABLE, None)
    try:
        if folder is not None:
            use_project(str(folder))
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before


# --- Loading of "module:attribute" from a file beside the recipe, or from an installed package ---
#
# Modules beside the recipe need not be installed, and their folder is not on the import path: only the named modules
# and the modules beside them that they import can be imported. Their names must differ from all other modules.


def load_object(name: str, noun: str) -> Any:
    """Load the object named by "module:attribute"; `noun` describes the object in errors.

    >>> load_object("math:pi", "the constant")
    3.141592653589793


    Raises:
        InvalidName: there is no such module or attribute, it cannot be imported, or a module beside the recipe
            has the name of another one.
    """
    module, _, attribute = name.partition(":")
    try:
        loaded = load_module(module)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            folder, top = project_folder().resolve(), module.partition(".")[0]
            wanted = f"{top}/__init__.py" if (folder / top).is_dir() else f"{module.replace('.', '/')}.py"
            raise InvalidName(
                f"{noun} {name!r}: there is no module {module!r}",
                code="module_missing",
                where=str(folder),
                remedy=f"write {wanted} beside the recipe, or install the package that has it",
            ) from error
        raise InvalidName(
            f"{noun} {name!r} cannot be loaded: {type(error).__name__}: {error}",
            code="name_not_loadable",
            where=_place(error) or name,
            remedy="correct the module, or install what it imports",
        ) from error
    if not attribute or not hasattr(loaded, attribute):
        raise InvalidName(
            f"{noun} {name!r}: module {module!r} has no {attribute or 'name after the colon'!r}",
            code="name_not_in_module",
            where=str(loaded.__file__),
            remedy="write MODULE:NAME with a name that the module defines",
        )
    return getattr(loaded, attribute)


def load_module(name: str) -> ModuleType:
    """Import a module; a module beside the recipe takes precedence.

    Raises:
        ConfigurationError: another module has the name of one beside the recipe.
        Exception: any error that the import raises.
    """
    find_module(name)
    return importlib.import_module(name)


def find_module(name: str) -> None:
    """Make a module beside the recipe importable, without importing it.

    Raises:
        ConfigurationError: another module has the name of one beside the recipe.
    """
    _FINDER.enter(project_folder().resolve(), name.partition(".")[0])


class _Source(SourceFileLoader):
    """A loader without bytecode files, because they compare size and whole seconds, which an edit may not change."""

    def path_stats(self, path: Any) -> NoReturn:
        raise OSError("no bytecode is kept")


class _BesideTheRecipe(MetaPathFinder):
    """A finder of the modules `names` in `folder`, including the contents of packages."""

    def __init__(self) -> None:
        self.folder, self.names = Path(), set[str]()
        self._versions: dict[Path, object] = {}

    def enter(self, folder: Path, name: str) -> None:
        """Find `name` in `folder` from now on, if it exists, and the modules in `folder` that it imports.

        Modules that were found before are imported again if the folder is another one or a file has changed.
        """
        if folder != self.folder or any(_version(file) != version for file, version in self._versions.items()):
            for module in [each for each in sys.modules if each.partition(".")[0] in self.names]:
                del sys.modules[module]
            self.folder, self.names, self._versions = folder, set(), {}
        if name in self.names or _beside(folder, name) is None:
            return
        modules = modules_beside(folder, name)
        for each, (path, files) in modules.items():
            _refuse_collision(each, path)
            self._versions |= {file: _version(file) for file in files}
        importlib.invalidate_caches()
        self.names |= {each for each, (_, files) in modules.items() if files}
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


def modules_beside(folder: Path, name: str) -> dict[str, tuple[Path, list[Path]]]:
    """Return the module `name` in `folder` and the modules there that it imports: the path and all files of each.

    Armature itself, in a clone, has no files here, because its own modules are imported once.
    """
    modules: dict[str, tuple[Path, list[Path]]] = {}
    waiting = [name]
    while waiting:
        each = waiting.pop()
        if each in modules or (path := _beside(folder, each)) is None:
            continue
        inside = path.parent.rglob("*.py") if path.name == "__init__.py" else [path]
        ours = each == __name__.partition(".")[0]
        files = [] if ours else [file for file in inside if file.is_file()]
        modules[each] = path, files
        waiting += [imported for file in files for imported in _imported(file)]
    return modules


def _beside(folder: Path, name: str) -> Path | None:
    """Return the file of the top-level module `name`, or None. A folder with `__init__.py` is a module too."""
    places = (folder / name / "__init__.py", folder / f"{name}.py")
    return next((path for path in places if path.is_file()), None)


def _refuse_collision(name: str, path: Path) -> None:
    """Check that the module at `path` does not have the name of another module.

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
    """Return the place of another module called `name` that is not at `path`; "" if no other exists."""
    if name in sys.stdlib_module_names:
        return "Python's own"
    loaded = sys.modules.get(name)
    specs = [loaded.__spec__] if loaded else [f.find_spec(name, None) for f in sys.meta_path if f is not _FINDER]
    for spec in filter(None, specs):
        places = [spec.origin] if spec.has_location else list(spec.submodule_search_locations or [])
        for place in places:
            # If `name.py` exists beside the recipe, a folder `name` there is not another module.
            if place and Path(place).resolve() not in (path.resolve(), path.resolve().with_suffix("")):
                return f"in {place}"
    return ""


def _version(file: Path) -> object:
    """Return a value that changes whenever the file changes; None if it cannot be read."""
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def _imported(file: Path) -> Iterator[str]:
    """Yield the top-level modules that a file imports, also inside of functions."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):  # importing the file reports this error
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _place(error: BaseException) -> str:
    """Return file and line where the import failed, if the file is beside the recipe; "" otherwise."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    place, trace = "", error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).is_relative_to(_FINDER.folder):
            place = f"{trace.tb_frame.f_code.co_filename}, line {trace.tb_lineno}"
        trace = trace.tb_next
    return place
