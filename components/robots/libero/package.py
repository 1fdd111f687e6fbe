"""Import of the libero package without its interactive questions, and the folders of its files and assets."""

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

# --- Compiling robosuite's controllers once per machine ---

FOLDER = "NUMBA_CACHE_DIR"
"""Environment variable of Numba: the folder of its compilation cache."""


def use_folder() -> None:
    """Set Numba's cache folder, unless the environment already does. Call this before Numba is imported.

    Numba's default is a folder next to robosuite's files, which may be read-only.
    """
    os.environ.setdefault(FOLDER, str(DownloadCache.standard().folder / "numba"))


def compile_once(first_steps: Callable[[], None]) -> None:
    """Run `first_steps`, which compile robosuite's controllers, unless another process has compiled them.

    Compiling takes 25 s of a core. When processes start together, one compiles and the others wait for it.
    """
    from llvmlite.binding import get_host_cpu_name

    name = "-".join([version("robosuite"), version("numba"), get_host_cpu_name()])
    make_once(Path(os.environ[FOLDER]) / name, lambda _: first_steps())


ASSETS = "ARMATURE_LIBERO_ASSETS"
"""Environment variable: folder of scenes, meshes and textures. If unset, the package finds or downloads its own."""

COMPACT = Path(__file__).with_name("compact")


@cache
def package_folder() -> Path:
    """Return the folder with bddl_files and init_files, without importing the package, which would ask on stdin.

    Raises:
        ConfigurationError: the package is not installed.
    """
    spec = find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigurationError("LIBERO is not installed", code="package_missing", remedy=install_command("libero"))
    return Path(spec.submodule_search_locations[0]) / "libero"


@cache
def import_libero() -> None:
    """Import the package so that `libero.libero.envs` can be imported afterwards.

    Raises:
        ConfigurationError: the package is not installed.
    """
    root = package_folder()
    if "LIBERO_CONFIG_PATH" not in os.environ:
        os.environ["LIBERO_CONFIG_PATH"] = _configuration_folder(root)
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    use_folder()
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it warns about a missing file in its own folder
    import_module("libero.libero")


def use_assets(folder: Path) -> None:
    """Set the folder of assets that the package loads from now on, in the whole process."""
    import libero.libero as libero

    libero._assets_path_cache = str(folder)


@cache
def assets_folder(compact: bool) -> Path:
    """Return the folder of scenes, objects and textures.

    Args:
        compact: use Armature's simple shapes instead of LIBERO's meshes.

    Raises:
        ConfigurationError: LIBERO's assets are unavailable.
    """
    import libero.libero as libero

    configured = str(COMPACT) if compact else os.environ.get(ASSETS)
    if configured is None:
        libero._assets_path_cache = None
    folder = _with_textures(Path(configured)) if configured else Path(libero.get_assets_path())
    if not (folder / "scenes").is_dir():
        raise ConfigurationError(
            "the assets of LIBERO are missing",
            code="assets_missing",
            where=ASSETS if configured and not compact else str(folder),
            remedy=f"set {ASSETS} to a folder with scenes/, textures/ ..., let the package download them once, "
            "or set simulator.assets = 'compact'",
        )
    return folder


def _configuration_folder(root: Path) -> str:
    """Write the configuration file that the package would otherwise ask for on stdin. Return the file's folder."""
    folder = _temporary()
    places = {"benchmark_root": "", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    lines = [f"{key}: {root / place}" for key, place in places.items()]
    (folder / "config.yaml").write_text("\n".join([*lines, f"datasets: {folder}", ""]))
    return str(folder)


def _with_textures(assets: Path) -> Path:
    """Return a temporary folder of links to everything in `assets` and to robosuite's textures.

    `assets` lacks textures of floors and walls, which robosuite has. If both have a texture, `assets` is used.
    """
    robosuite = find_spec("robosuite")
    assert robosuite is not None and robosuite.submodule_search_locations, "a dependency of the libero package"
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
    """Return a folder that is deleted when this process ends."""
    folder = Scratch()
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[Scratch] = []
