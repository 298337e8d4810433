"""Targets: an angle does not jump but at its seam, a quaternion has no sign, and what is not there is named."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from lewm.data.store import EpisodeStore, write_episodes
from lewm.envs.quantities import Quantity
from lewm.envs.registry import env_entry, env_type
from lewm.errors import DataError, EnvError
from lewm.understand.targets import Target, read_truth, targets_of

WORLDS = ("tworoom", "pusht", "reacher", "cube")


def forms(quantity: Quantity, values: np.ndarray) -> dict[str, Target]:
    """The targets of a quantity that is all of the state, by form."""
    return {target.form: target for target in targets_of(quantity, quantity.numbers, values)}


def test_an_angle_jumps_at_its_seam_only_and_its_sine_and_cosine_nowhere() -> None:
    angles = np.linspace(-3 * math.pi, 3 * math.pi, 2001)[:, None]
    seam = math.pi / 2
    found = forms(Quantity("turn", ("a",), "angle", seam=seam), angles)
    circle, raw = found["sine and cosine"].values, found["raw, seam at 90°"].values
    assert np.abs(np.diff(circle, axis=0)).max() < 0.02
    jumps = np.flatnonzero(np.abs(np.diff(raw[:, 0])) > 1)
    assert len(jumps) == 3
    np.testing.assert_allclose((angles[jumps, 0] - seam) % (2 * math.pi), 2 * math.pi, atol=0.02)
    assert raw.min() >= seam
    assert raw.max() < seam + 2 * math.pi


def test_a_quarter_turn_is_none_for_an_angle_of_that_period() -> None:
    quantity = Quantity("turn", ("a",), "angle", period=math.pi / 2)
    angles = np.random.default_rng(0).uniform(-3, 3, (50, 1))
    once, again = forms(quantity, angles), forms(quantity, angles + math.pi / 2)
    for form, target in once.items():
        np.testing.assert_allclose(target.values, again[form].values, atol=1e-9)
    circle = once["sine and cosine"]
    shifted = forms(quantity, angles + math.radians(3))["sine and cosine"]
    assert circle.error(shifted.values, circle.values) == pytest.approx(3)


def test_the_error_of_a_raw_angle_goes_the_short_way_round() -> None:
    raw = forms(Quantity("turn", ("a",), "angle"), np.array([[0.01], [1.0]]))["raw, seam at 0°"]
    assert raw.error(np.array([[2 * math.pi - 0.01], [1.02]]), raw.values) == pytest.approx(math.degrees(0.02))


def test_a_quaternion_and_its_negative_are_one_orientation() -> None:
    rng = np.random.default_rng(0)
    turns = rng.normal(size=(100, 4))
    turns[:5, 0] = 0  # half turns, where the first number has no sign
    names = ("w", "x", "y", "z")
    signs = rng.choice([-1.0, 1.0], (100, 1))
    for kind in ("quaternion", "yaw"):
        quantity = Quantity("orientation", names, kind)
        for form, target in forms(quantity, turns).items():
            other = forms(quantity, signs * turns)[form]
            np.testing.assert_allclose(target.values, other.values, atol=1e-9)
            assert target.error(other.values, target.values) == pytest.approx(0, abs=1e-5)


def test_turns_are_measured_in_degrees() -> None:
    angles = np.random.default_rng(0).uniform(-3, 3, 50)

    def about_z(angle: np.ndarray) -> np.ndarray:
        zero = np.zeros_like(angle)
        return np.stack([np.cos(angle / 2), zero, zero, np.sin(angle / 2)], axis=1)

    quantity = Quantity("orientation", ("w", "x", "y", "z"), "quaternion")
    found, turned = (forms(quantity, about_z(angles + more)) for more in (0.0, math.radians(10)))
    for form, target in found.items():
        assert target.error(turned[form].values, target.values) == pytest.approx(10, abs=1e-4)
    yaw = forms(Quantity("yaw", ("w", "x", "y", "z"), "yaw", seam=-math.pi), about_z(angles))["raw, seam at -180°"]
    np.testing.assert_allclose(yaw.values[:, 0], angles)


def test_quantities_are_checked() -> None:
    with pytest.raises(EnvError, match="give it 4 numbers"):
        Quantity("orientation", ("w", "x"), "quaternion")
    with pytest.raises(EnvError, match="Did you mean 'agent_x'"):
        Quantity("place", ("agent_z",)).places(("agent_x", "block_y"))
    with pytest.raises(EnvError, match="period"):
        Quantity("turn", ("a",), "angle", period=0)


@pytest.mark.parametrize("world", WORLDS)
def test_what_worlds_declare_is_in_their_states(world: str) -> None:
    env = env_type(world)
    assert env.quantities
    for quantity in env.quantities:
        assert len(quantity.places(env.state_names)) == len(quantity.numbers)


def test_a_block_out_of_the_picture_is_not_visible() -> None:
    here = np.array([256.0, 256, 256, 256, 0, 0, 0])
    below, turned_out, beside = here.copy(), here.copy(), here.copy()
    below[3] = 500  # its upper edge is in the picture, its middle is not
    turned_out[2:5] = 256, 20, math.pi  # stem up
    beside[0] = -5
    states = np.stack([here, below, turned_out, beside])
    np.testing.assert_array_equal(env_type("pusht").visible(states), [True, False, False, False])


def write(path: Path, states: np.ndarray | None, **attributes: str) -> EpisodeStore:
    """An open dataset of one episode with these states."""
    columns = {"action": np.zeros((4, 2), np.float32), "pixels": np.zeros((4, 8, 8, 3), np.uint8)}
    write_episodes(path, [columns if states is None else {**columns, "state": states}], attributes)
    return EpisodeStore(path)


def test_an_unknown_property_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with write(tmp_path / "data.h5", np.zeros((4, 2))) as store:
        with pytest.raises(DataError, match="Did you mean 'agent position'"):
            read_truth(store, env_entry("tworoom"), ("agent positon",))
        (target,) = read_truth(store, env_entry("tworoom"), ("agent position",)).targets
    assert (target.name, target.unit, target.values.shape) == ("agent position", "px", (4, 2))


def test_data_without_fit_states_are_refused(tmp_path: Path) -> None:
    with write(tmp_path / "none.h5", None) as store, pytest.raises(DataError, match="no column 'state'"):
        read_truth(store, env_entry("tworoom"))
    with write(tmp_path / "three.h5", np.zeros((4, 3))) as store, pytest.raises(DataError, match="of 3 numbers"):
        read_truth(store, env_entry("tworoom"))
    broken = np.zeros((4, 2))
    broken[2, 1] = np.nan
    with write(tmp_path / "nan.h5", broken) as store, pytest.raises(DataError, match="row 2"):
        read_truth(store, env_entry("tworoom"))


def test_states_of_an_unknown_world_are_plain_numbers(tmp_path: Path) -> None:
    with write(tmp_path / "data.h5", np.arange(12.0).reshape(4, 3)) as store:
        truth = read_truth(store, None)
    assert [target.name for target in truth.targets] == ["state 0", "state 1", "state 2"]
    assert truth.visible.all()
