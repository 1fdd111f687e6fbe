"""The libero package: where it and its assets lie, and its import without questions or changes to it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from components.contracts.errors import ConfigurationError

ASSETS = "ARMATURE_LIBERO_ASSETS"
"""Variable with the folder of scenes, meshes and textures; without it the package finds or fetches its own."""


@cache
def package_folder() -> Path:
    """The folder with bddl_files and init_files. Nothing of the package is imported, which would ask on stdin.

    Raises:
        ConfigurationError: the package is not installed.
    """
    found = find_spec("libero")
    if found is None or not found.submodule_search_locations:
        raise ConfigurationError("LIBERO is not installed", remedy="pip install 'armature[libero]'")
    return Path(found.submodule_search_locations[0]) / "libero"


@cache
def import_libero() -> None:
    """Afterwards `libero.libero.envs` can be imported and its assets are there.

    Raises:
        ConfigurationError: the package or its assets cannot be had.
    """
    root = package_folder()
    if "LIBERO_CONFIG_PATH" not in os.environ:
        os.environ["LIBERO_CONFIG_PATH"] = _answers(root)
    if sys.platform == "linux":
        os.environ.setdefault("MUJOCO_GL", "egl")
    logging.getLogger("robosuite_logs").setLevel(logging.ERROR)  # it asks for a file in its own folder
    import libero.libero as libero

    if given := os.environ.get(ASSETS):
        libero._assets_path_cache = str(_with_textures(Path(given)))
    folder = Path(libero.get_assets_path())
    if not (folder / "scenes").is_dir():
        raise ConfigurationError(
            "LIBERO's assets are not there",
            where=str(folder),
            remedy=f"set {ASSETS} to a folder with scenes/, textures/ ..., or let the package fetch them once",
        )


def _answers(root: Path) -> str:
    """A folder with the configuration that the package would ask for."""
    folder = _temporary()
    places = {"benchmark_root": "", "bddl_files": "bddl_files", "init_states": "init_files", "assets": "assets"}
    lines = [f"{key}: {root / place}" for key, place in places.items()]
    (folder / "config.yaml").write_text("\n".join([*lines, f"datasets: {folder}", ""]))
    return str(folder)


def _with_textures(assets: Path) -> Path:
    """The folder with links to robosuite's textures where it lacks one: LIBERO's floors and walls come from there.

    Raises:
        ConfigurationError: it is no folder of assets.
    """
    if not (assets / "textures").is_dir():
        raise ConfigurationError("no folder of LIBERO's assets: it has no textures/", where=f"{ASSETS}={assets}")
    robosuite = find_spec("robosuite")
    assert robosuite is not None and robosuite.submodule_search_locations, "LIBERO's package needs it"
    theirs = Path(robosuite.submodule_search_locations[0]) / "models/assets/textures"
    folder = _temporary()
    (folder / "textures").mkdir()
    for source in (theirs, assets / "textures"):
        for path in source.iterdir():
            link = folder / "textures" / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    for path in assets.iterdir():
        if path.name != "textures":
            (folder / path.name).symlink_to(path.resolve())
    return folder


def _temporary() -> Path:
    """A folder that goes with this process."""
    folder = tempfile.TemporaryDirectory(prefix="libero-")
    _KEPT.append(folder)
    return Path(folder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []
