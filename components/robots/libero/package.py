"""The libero package: where it and its assets lie, and its import without questions or changes to it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from armature.components.artifacts.cache import DownloadCache, make_once
from armature.components.contracts.errors import ConfigurationError
from armature.components.contracts.installation import install_command
from armature.components.machine.process import Scratch

# robosuite's controllers, compiled by one process of a machine for all.

FOLDER = "NUMBA_CACHE_DIR"
"""Numba's variable with the folder of what it has compiled."""


def use_folder() -> None:
    """Before Numba is imported. Its own choice is beside robosuite's files, where not everybody may write."""
    os.environ.setdefault(FOLDER, str(DownloadCache.standard().folder / "numba"))


def compile_once(first_steps: Callable[[], None]) -> None:
    """Let a simulator take its first steps, unless a process has: they compile, which takes 25 s of a core.

    Processes that start together would all compile. Here one does, and the others wait for it.
    """
    from llvmlite.binding import get_host_cpu_name

    name = "-".join([version("robosuite"), version("numba"), get_host_cpu_name()])
    make_once(Path(os.environ[FOLDER]) / name, lambda _: first_steps())


ASSETS = "ARMATURE_LIBERO_ASSETS"
"""Variable with the folder of scenes, meshes and textures; without it the package finds or fetches its own."""

COMPACT = Path(__file__).with_name("compact")


@cache
def package_folder() -> Path:
    """The folder with bddl_files and init_files. Nothing of the package is imported, which would ask on stdin.

    Raises:
        ConfigurationError: the package is not installed.
    """
    found = find_spec("libero")
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError("LIBERO is not installed", code="package_missing", remedy=install_command("libero"))
    return Path(found.submodule_search_locations[0]) / "libero"


@cache
def import_libero() -> None:
    """Afterwards `libero.libero.envs` can be imported.

    Raises:
        ConfigurationError: the package is not installed.
    """
    root = package_folder()
    if "LIBERO_CONFIG_PATH" not in os.environ:
        os.environ["LIBERO_CONFIG_PATH"] = _answers(root)
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    use_folder()
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it asks for a file in its own folder
    import_module("libero.libero")


def use_assets(folder: Path) -> None:
    """What the package loads from now on; it has one place for a process."""
    import libero.libero as libero

    libero._assets_path_cache = str(folder)


@cache
def assets_folder(compact: bool) -> Path:
    """Of scenes, objects and textures.

    Args:
        compact: Our own simple shapes instead of LIBERO's.

    Raises:
        ConfigurationError: LIBERO's are unavailable.
    """
    import libero.libero as libero

    given = str(COMPACT) if compact else os.environ.get(ASSETS)
    if given is None:
        libero._assets_path_cache = None
    folder = _with_textures(Path(given)) if given else Path(libero.get_assets_path())
    if not (folder / "scenes").is_dir():
        raise ConfigurationError(
            "LIBERO's assets are not there",
            code="assets_missing",
            where=ASSETS if given and not compact else str(folder),
            remedy=f"set {ASSETS} to a folder with scenes/, textures/ ..., let the package fetch them once, "
            "or set simulator.assets = 'compact'",
        )
    return folder


def _answers(root: Path) -> str:
    """A folder with the configuration that the package would ask for."""
    folder = _temporary()
    places = {"benchmark_root": "", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    lines = [f"{key}: {root / place}" for key, place in places.items()]
    (folder / "config.yaml").write_text("\n".join([*lines, f"datasets: {folder}", ""]))
    return str(folder)


def _with_textures(assets: Path) -> Path:
    """Links to all of a folder, and to robosuite's textures where it lacks one: floors and walls come from there."""
    robosuite = find_spec("robosuite")
    assert robosuite is not None and robosuite.submodule_search_locations, "LIBERO's package needs it"
    theirs = Path(robosuite.submodule_search_locations[0]) / "models/assets/textures"
    folder = _temporary()
    (folder / "textures").mkdir()
    for path in [*theirs.glob("*"), *assets.glob("textures/*")]:
        link = folder / "textures" / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path.resolve())
    for path in assets.glob("*"):
        if path.name != "textures":
            (folder / path.name).symlink_to(path.resolve())
    return folder


def _temporary() -> Path:
    """A folder that goes with this process."""
    folder = Scratch()
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[Scratch] = []
