"""What the MuJoCo worlds share: a GL driver that is found or asked for, cheap frames, steps without a memory."""

from __future__ import annotations

import atexit
import copy
import importlib
import os
import sys
import warnings
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from gymnasium.spaces import Box

from lewm.envs.base import Colour, ObsType, WorldEnv
from lewm.errors import EnvError
from lewm.types import Array

# Joint angles and velocities have no natural bounds, but Gymnasium's checker asks for finite ones.
STATE_BOUND = 1e6
GL_ADVICE = (
    "On Linux without a display set MUJOCO_GL=egl (lewm does so if it is unset) and install a driver: "
    "NVIDIA's, or Mesa's with `apt-get install libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri`."
)


_import_errors: list[Exception] = []  # why no GL library could be loaded, for who asks for a frame


def import_simulator(name: str) -> Any:
    """Import MuJoCo or what builds on it. They load a GL library meanwhile; if that fails, they come without one."""
    has_display = any(os.environ.get(variable) for variable in ("DISPLAY", "WAYLAND_DISPLAY"))
    if sys.platform == "linux" and not has_display:
        os.environ.setdefault("MUJOCO_GL", "egl")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError:
        raise  # not installed: the registry says how to
    except Exception as error:  # each GL library has its own
        _import_errors.append(error)
        module = _import_without_gl(name)
    _close_first_at_exit()
    return module


def _import_without_gl(name: str) -> Any:
    setting = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "off"
    try:
        return importlib.import_module(name)
    finally:
        del os.environ["MUJOCO_GL"]
        if setting is not None:
            os.environ["MUJOCO_GL"] = setting


# One for each kind of world and size of frame, as long as a world uses it: a GL context takes tens of megabytes.
_painters: weakref.WeakValueDictionary[tuple[type, int], Painter] = weakref.WeakValueDictionary()


def _close_first_at_exit() -> None:
    """Make closing the renderers the first thing at exit, again after each who may have added to the list.

    What is registered last runs first, and both MuJoCo and dm_control register the end of EGL itself.
    """
    atexit.unregister(_close_painters)
    atexit.register(_close_painters)


def _close_painters() -> None:
    for painter in list(_painters.values()):
        painter.close()


mujoco = import_simulator("mujoco")


class MujocoEnv(WorldEnv):
    """A world simulated and drawn by MuJoCo, whose state begins with the joint positions ``qpos``.

    ``camera`` draws the frames. ``object_geoms`` names the geoms that are painted for each of ``objects``.
    Nothing is drawn before a frame is asked for, so that observing states needs no GL driver.
    """

    camera: ClassVar[str]
    object_geoms: ClassVar[dict[str, tuple[str, ...]]]

    def __init__(self, action_dim: int, resolution: int, obs_type: ObsType, render_mode: str | None) -> None:
        states = Box(-STATE_BOUND, STATE_BOUND, (len(self.state_names),), np.float64)
        actions = Box(-1.0, 1.0, (action_dim,), np.float32)
        super().__init__(states, actions, resolution, obs_type, render_mode)
        self._painter: Painter | None = None
        self._colours: dict[str, Colour | None] = {}  # of what was painted, None: in its own again

    @abstractmethod
    def _scene(self) -> Any:
        """The MjModel to draw, from ``drawing_model``; shared by all environments of the process."""

    def render(self) -> Array:
        return self._draw_states(self.state[None])[0]

    def _draw_states(self, states: Array) -> Array:
        if self._painter is None:
            key = type(self), self.resolution
            self._painter = _painters.get(key) or Painter(self._scene(), self.camera, self.resolution)
            _painters[key] = self._painter
        for name, geoms in self.object_geoms.items():
            self._painter.paint(geoms, self._colours.get(name))
        frames = np.empty((len(states), self.resolution, self.resolution, 3), np.uint8)
        for frame, state in zip(frames, states, strict=True):
            self._painter.draw(state, frame)
        return frames

    def _paint(self, name: str, colour: Colour | None) -> None:
        self._colours[name] = colour

    def _sample_goal(self, start: Array) -> Array:
        while self.is_success(goal := self._sample_start(), start):
            pass  # rare: a goal that is reached already is none
        return goal

    def close(self) -> None:
        """Free the renderer, unless other worlds use it; the next frame would make another."""
        self._painter = None


def physics_model(model: Any) -> Any:
    """``model`` (an MjModel), which will no longer reset itself in silence when a simulation diverges."""
    model.opt.disableflags |= int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)
    return model


def advance(model: Any, data: Any, substeps: int) -> None:
    """Simulate ``substeps`` physics steps, as a pure function of qpos, qvel and ctrl.

    MuJoCo's solver starts from its last solution, which no state has. Here each control step starts it from zero; it
    converges to the same accuracy, and a restored state continues as the original did, bit by bit.
    """
    data.qacc_warmstart[:] = 0
    mujoco.mj_step(model, data, nstep=substeps)
    if not (np.isfinite(data.qpos).all() and np.isfinite(data.qvel).all()):
        raise EnvError("The simulation diverged: a position or velocity is not finite. Start from another state.")


def drawing_model(spec: Any, hidden: Sequence[str]) -> Any:
    """Compile a model (an MjSpec, which is changed) for cheap frames that every driver draws alike.

    No shadows, reflections or multisampling, which cost a software renderer most of its time; the samples of a pixel
    also lie elsewhere on each driver. No sky. Geoms named in ``hidden`` are not drawn.
    """
    for texture in list(spec.textures):
        if texture.type == mujoco.mjtTexture.mjTEXTURE_SKYBOX:
            spec.delete(texture)
    model = spec.compile()
    model.vis.quality.offsamples = 0
    model.vis.quality.shadowsize = 0
    model.mat_reflectance[:] = 0
    for name in hidden:
        model.geom(name).group = mujoco.mjNGROUP - 1
    return model


class Painter:
    """Draws states of one model through one camera, with a GL context of its own."""

    def __init__(self, model: Any, camera: str, resolution: int) -> None:
        self._gl: Any = None  # if making it fails, there is nothing to free
        model = copy.copy(model)  # paint and frame size are ours alone
        model.vis.global_.offwidth = model.vis.global_.offheight = resolution
        self._model, self._data = model, mujoco.MjData(model)
        self._scene, self._options = mujoco.MjvScene(model, maxgeom=2 * model.ngeom), mujoco.MjvOption()
        self._options.sitegroup[:] = 0
        self._own_rgba = model.geom_rgba.copy()
        self._camera = mujoco.MjvCamera()
        self._camera.type, self._camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, model.camera(camera).id
        self._view = mujoco.MjrRect(0, 0, resolution, resolution)
        self._gl, self._context = _gl_context(model)
        _close_first_at_exit()

    def draw(self, state: Array, frame: Array) -> None:
        """Draw a state, of which only the leading joint positions matter, into ``frame``, uint8 (R, R, 3)."""
        model, data = self._model, self._data
        data.qpos[:] = state[: model.nq]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_camlight(model, data)
        everything = mujoco.mjtCatBit.mjCAT_ALL
        mujoco.mjv_updateScene(model, data, self._options, None, self._camera, everything, self._scene)
        self._gl.make_current()
        mujoco.mjr_render(self._view, self._scene, self._context)
        pixels = np.empty_like(frame)
        mujoco.mjr_readPixels(pixels, None, self._view, self._context)
        frame[:] = pixels[::-1]  # GL's first row is the lowest

    def paint(self, geoms: Sequence[str], colour: Colour | None) -> None:
        """Draw geoms in a colour from now on; None: in their own."""
        for name in geoms:
            geom = self._model.geom(name)
            geom.rgba[:] = self._own_rgba[geom.id] if colour is None else (*(c / 255 for c in colour), 1.0)

    def close(self) -> None:
        """Free the GL context; harmless when done twice."""
        if self._gl is not None:
            self._gl.make_current()  # or another painter's textures would be freed
            self._context.free()
            self._gl.free()
            self._gl = None

    def __del__(self) -> None:
        self.close()


def _gl_context(model: Any) -> tuple[Any, Any]:
    """A GL context, now current, and MuJoCo's own on top of it, for frames of the size that the model names."""
    size, setting = model.vis.global_, os.environ.get("MUJOCO_GL", "unset")
    try:
        # MuJoCo has chosen when it was imported, which may have been before we could set the variable.
        library = importlib.import_module("mujoco.egl") if setting == "egl" else mujoco
        with warnings.catch_warnings(record=True) as complaints:
            warnings.simplefilter("always")
            gl = library.GLContext(size.offwidth, size.offheight)
        for complaint in complaints:
            if complaint.category.__name__ == "GLFWError":  # its way to say that there is no display
                raise RuntimeError(complaint.message)
        gl.make_current()
        context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
    except Exception as error:
        cause = (*_import_errors, error)[0]
        raise EnvError(f"MuJoCo cannot draw without OpenGL (MUJOCO_GL is {setting}: {cause}). {GL_ADVICE}") from error
    mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, context)
    return gl, context
