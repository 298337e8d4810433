"""MuJoCo worlds draw with what GL there is, say so when there is none, and leave nothing behind."""

import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("mujoco")

from lewm.envs import make_env
from lewm.envs.mujoco import advance, mujoco
from lewm.errors import EnvError

DRAW = """
from lewm.envs import make_env
from lewm.errors import EnvError
for name in {names}:
    env = make_env(name, resolution=28)
    env.reset(seed=0)
    env.step(env.action_space.sample())
    print("stepped", name)
    try:
        print("drawn", env.render().shape)
    except EnvError as error:
        print(error)
"""
GL_VARIABLES = ("MUJOCO_GL", "PYOPENGL_PLATFORM", "DISPLAY", "WAYLAND_DISPLAY")


def run_python(code: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process whose GL settings are these only."""
    environ = {name: value for name, value in os.environ.items() if name not in GL_VARIABLES} | variables
    return subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)


def test_frames_need_no_settings_and_leave_no_complaint_at_exit():
    # The renderers stay open. The cube's packages, imported while one is, register further ends of EGL.
    done = run_python(DRAW.format(names=("reacher", "cube")))
    assert done.stdout.splitlines()[1::2] == ["drawn (28, 28, 3)"] * 2
    assert done.stderr == ""


@pytest.mark.skipif(sys.platform != "linux", reason="the drivers are those of Linux")
@pytest.mark.parametrize(
    "variables",
    [
        {"MUJOCO_GL": "nonsense"},
        {"MUJOCO_GL": "glfw"},
        {"MUJOCO_GL": "off"},
        {"__EGL_VENDOR_LIBRARY_FILENAMES": "/no/driver"},
    ],
    ids=lambda variables: "-".join(variables.values()),
)
def test_without_gl_states_work_and_frames_say_what_to_install(variables):
    lines = run_python(DRAW.format(names=("reacher", "cube")), **variables).stdout.splitlines()
    assert lines[::2] == ["stepped reacher", "stepped cube"]
    for line in lines[1::2]:
        assert "cannot draw without OpenGL" in line
        assert "MUJOCO_GL=egl" in line
        assert "libegl1 libgl1 libegl-mesa0 libgl1-mesa-dri" in line


def test_the_registry_imports_no_simulator():
    code = "import sys, lewm.envs; print([m for m in ('mujoco', 'dm_control', 'ogbench') if m in sys.modules])"
    assert run_python(code).stdout.strip() == "[]"


def test_closing_one_renderer_leaves_the_others_alone():
    first, second = make_env("reacher", resolution=32), make_env("reacher", resolution=48)
    for env in (first, second):
        env.reset(seed=0)
    before = second.render()
    frame = first.render()
    second.render()
    first.close()
    np.testing.assert_array_equal(second.render(), before)
    np.testing.assert_array_equal(first.render(), frame, err_msg="a closed environment can still draw")


def test_paint_shows_in_the_first_frame_and_goes_with_the_episode():
    env = make_env("reacher", resolution=56)
    env.reset(seed=0)
    env.paint("arm", (0, 255, 0))
    painted = env.render()
    assert (painted[:, :, 1] > 2 * painted[:, :, 0].astype(int) + 50).any()
    env.reset(seed=0)
    own = env.render()
    assert (own != painted).any()
    np.testing.assert_array_equal(make_env("reacher", resolution=56).render_states(env.state[None])[0], own)


def test_a_simulation_that_diverges_is_an_error_and_no_new_episode():
    env = make_env("reacher")
    env.reset(seed=0)
    env._data.qvel[0] = np.inf
    with pytest.raises(EnvError, match="diverged"):
        advance(env._model, env._data, substeps=1)
    assert env._model.opt.disableflags & int(mujoco.mjtDisableBit.mjDSBL_AUTORESET)


def test_worlds_of_a_kind_share_a_renderer_but_not_their_colours():
    plain, painted = make_env("reacher", resolution=56), make_env("reacher", resolution=56)
    for env in (plain, painted):
        env.reset(seed=1)
    before = plain.render()
    painted.paint("arm", (0, 255, 0))
    assert (painted.render() != before).any()
    assert np.array_equal(plain.render(), before)
    assert plain._painter is painted._painter
    plain.close()
    assert (painted.render() != before).any(), "closing one leaves the other's renderer alone"
    painted.close()
