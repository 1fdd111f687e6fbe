"""Rendering of a simulation's cameras, only when images are requested and not at every step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from armature.components.contracts.errors import ConfigurationError

if TYPE_CHECKING:
    import mujoco

MOST_GEOMETRIES = 1000
"""Maximum number of geometries in a rendered scene, robosuite's value."""


class Cameras:
    """Fixed cameras of one simulator, with their own GL context.

    A process may have several instances: each makes its context current before it uses or frees anything. With
    reflections and MuJoCo's default number of samples, images equal the ones from robosuite's offscreen renderer, pixel
    for pixel.
    """

    def __init__(self, names: Sequence[str], resolution: int, reflections: bool, samples: int) -> None:
        import mujoco

        self._names, self._side, self._reflections, self._samples = tuple(names), resolution, reflections, samples
        self._context: Any = gl_context(resolution)
        self._options = mujoco.MjvOption()
        self._options.geomgroup[0] = 0  # collision geometry
        self._moved = mujoco.MjvPerturb()
        self._moved.active, self._moved.select, self._moved.skinselect = 0, 0, -1
        self._drawn: mujoco.MjrContext | None = None
        self._looks: mujoco.MjModel | None = None

    def show(self, model: mujoco.MjModel, looks: mujoco.MjModel | None = None) -> None:
        """Render this model from now on.

        Args:
            looks: a model with the same meshes and textures. If it is the same object as in the previous call, they are
                not loaded to the GPU again. None: the model has meshes and textures of its own.

        Raises:
            ConfigurationError: the model does not have one of the cameras.
        """
        import mujoco

        cameras = [model.camera(number).name for number in range(model.ncam)]
        if unknown := [name for name in self._names if name not in cameras]:
            raise ConfigurationError(
                f"LIBERO has no camera {unknown[0]!r}",
                code="unknown_camera",
                where="simulator.camera_name_mapping",
                remedy=f"choose among {', '.join(cameras)}",
            )
        model.vis.quality.offsamples = self._samples
        model.vis.global_.offwidth = max(self._side, model.vis.global_.offwidth)
        model.vis.global_.offheight = max(self._side, model.vis.global_.offheight)
        self._model = model
        self._numbers = {name: cameras.index(name) for name in self._names}
        if looks is not None and looks is self._looks:
            return
        self._free()
        self._looks = looks
        self._scene = mujoco.MjvScene(model, MOST_GEOMETRIES)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = self._reflections
        self._drawn = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_150)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._drawn)

    def draw(self, data: mujoco.MjData) -> dict[str, NDArray[np.uint8]]:
        """Return RGB images (side, side, 3) by camera, rotated by 180° relative to MuJoCo's, as in LIBERO's
        datasets."""
        import mujoco

        self._context.make_current()
        camera = mujoco.MjvCamera()
        camera.type = mujoco.mjtCamera.mjCAMERA_FIXED
        view = mujoco.MjrRect(0, 0, self._side, self._side)
        images = {}
        for name, number in self._numbers.items():
            camera.fixedcamid = number
            mujoco.mjv_updateScene(
                self._model, data, self._options, self._moved, camera, mujoco.mjtCatBit.mjCAT_ALL, self._scene
            )
            mujoco.mjr_render(view, self._scene, self._drawn)
            pixels = np.empty((self._side, self._side, 3), np.uint8)
            mujoco.mjr_readPixels(pixels, None, view, self._drawn)
            images[name] = np.ascontiguousarray(pixels[::-1, ::-1])
        return images

    def close(self) -> None:
        """Free the GL context and everything in it."""
        self._free()
        self._context.free()

    def _free(self) -> None:
        self._context.make_current()
        if self._drawn is not None:
            self._drawn.free()
            self._drawn = None


def gl_context(side: int) -> Any:
    """Return a GL context of the kind named by the environment variable MUJOCO_GL (default egl).

    Raises:
        ConfigurationError: the kind is unknown, or its driver is missing.
    """
    kind = os.environ.get("MUJOCO_GL", "egl").lower()
    if kind not in ("egl", "osmesa", "glfw"):
        raise ConfigurationError(
            "unknown renderer", code="unknown_renderer", where="MUJOCO_GL", remedy="set it to egl, osmesa or glfw"
        )
    try:
        return import_module(f"mujoco.{kind}").GLContext(side, side)
    except (ImportError, RuntimeError, AttributeError) as error:
        raise ConfigurationError(
            f"rendering is unavailable: {error}",
            code="rendering_unavailable",
            where=f"MUJOCO_GL={kind}",
            remedy="set it to egl, osmesa or glfw, and install that driver (libegl1 and libgl1-mesa-dri)",
        ) from error
