"""The map: an encoder that sees places keeps the grid, one that hashes them does not, and every world has states."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from seers import blind, place, seer, shuffled

from lewm.envs.registry import env_entry, make_env
from lewm.envs.tworoom import DOOR_Y, WALL_LEFT, WALL_RIGHT
from lewm.errors import ConfigError
from lewm.understand import latent_map as maps
from lewm.understand.findings import read_findings
from lewm.understand.latent_map import MapSettings, latent_map, mapped
from lewm.understand.sheets import make_grid, own_sheet, sheets_of

QUICK = MapSettings(grid=6)


def test_an_encoder_of_places_keeps_the_grid(debug_run: Path) -> None:
    (chart,) = latent_map(seer(debug_run, "place", place), QUICK).numbers["sheets"]
    assert chart["rank_correlation"] > 0.99
    assert chart["neighbours"]["embedding"] > 0.9
    assert chart["neighbours"]["PCA"] == pytest.approx(chart["neighbours"]["embedding"])
    assert chart["explained"] == pytest.approx(1)


def test_an_encoder_that_hashes_does_not(debug_run: Path) -> None:
    (chart,) = latent_map(seer(debug_run, "shuffled", shuffled), MapSettings(grid=10)).numbers["sheets"]
    assert abs(chart["rank_correlation"]) < 0.2
    assert chart["neighbours"]["embedding"] < 4 * chart["luck"]


def test_one_that_sees_nothing_has_no_correlation_and_no_nan(debug_run: Path, tmp_path: Path) -> None:
    found = mapped(seer(debug_run, "blind", blind), QUICK, tmp_path, None)
    assert found.numbers["sheets"][0]["rank_correlation"] is None
    assert "NaN" not in (tmp_path / "map.json").read_text()
    assert found.tables[0].rows[0][2] == "–"


def test_page_figure_and_pictures_are_written_and_found_again(
    debug_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = seer(debug_run, "place", place)
    found = mapped(subject, QUICK, tmp_path, None)
    assert {path.name for path in tmp_path.iterdir()} == {"map.md", "map.json", "map.png", "map-states.png"}
    for name in ("map.png", "map-states.png"):
        with Image.open(tmp_path / name) as picture:
            assert np.asarray(picture).std() > 1, "something is drawn"
    assert found == read_findings(tmp_path, "map")
    json.loads((tmp_path / "map.json").read_text())
    monkeypatch.setattr(maps, "latent_map", None)  # would fail if it were asked again
    assert mapped(subject, QUICK, tmp_path, None) == found
    with pytest.raises(TypeError):
        mapped(subject, MapSettings(grid=7), tmp_path, None)


@pytest.mark.skipif(not importlib.util.find_spec("sklearn"), reason="needs scikit-learn")
def test_t_sne_keeps_neighbours(debug_run: Path) -> None:
    found = latent_map(seer(debug_run, "place", place), MapSettings(grid=8))
    assert found.numbers["sheets"][0]["neighbours"]["t-SNE"] > 0.6
    assert not any("no t-SNE" in sentence for sentence in found.sentences)


def test_without_scikit_learn_the_rest_is_there(debug_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.manifold", None)
    found = latent_map(seer(debug_run, "place", place), QUICK)
    assert set(found.numbers["sheets"][0]["planes"]) == {"PCA"}
    assert any("lewm[understand]" in sentence for sentence in found.sentences)
    maps.draw(found)


def test_two_numbers_of_ones_own(debug_run: Path) -> None:
    subject = seer(debug_run, "place", place)
    found = latent_map(subject, MapSettings(6, "agent_y", "agent_x", (60.0, 120.0), (30.0, 90.0)))
    (chart,) = found.numbers["sheets"]
    assert chart["axes"] == ["agent_y", "agent_x"]
    assert np.array(chart["places"]).max(0).tolist() == [120, 90]
    with pytest.raises(ConfigError, match="agent_x"):
        latent_map(subject, MapSettings(6, "agent_z", "agent_x"))
    for wrong in ({"x": "agent_x"}, {"x": "a", "y": "a"}, {"x_range": (0.0, 1.0)}, {"grid": 3}):
        with pytest.raises(ConfigError, match=r"map\."):
            MapSettings(**wrong)
    with pytest.raises(ConfigError, match="range"):
        latent_map(subject, MapSettings(6, "agent_x", "agent_y", (50.0, 50.0)))


@pytest.mark.parametrize("world", ["tworoom", "pusht", "reacher", "cube"])
def test_every_world_has_states_that_differ_as_they_should(world: str) -> None:
    if env_entry(world).extra:
        pytest.importorskip("ogbench")
    with contextlib.closing(make_env(world, 28)) as env:
        for sheet in sheets_of(env_entry(world)):
            grid = make_grid(env, sheet, 5, 0)
            assert 15 <= len(grid.states) <= 25
            frames = env.render_states(grid.states)
            assert len(np.unique(frames.reshape(len(frames), -1), axis=0)) > 0.9 * len(frames)
            varied = {env.state_names[i] for i in np.flatnonzero(np.ptp(grid.states, axis=0) > 0)}
            assert varied == {*sheet.x.numbers, *sheet.y.numbers}


def test_no_state_is_in_the_wall_and_a_turn_ends_where_it_began() -> None:
    with contextlib.closing(make_env("tworoom", 28)) as env:
        states = make_grid(env, sheets_of(env_entry("tworoom"))[0], 30, 0).states
        inside = states[(states[:, 0] > WALL_LEFT) & (states[:, 0] < WALL_RIGHT)]
        assert len(inside)
        assert (np.abs(inside[:, 1] - DOOR_Y) < 20).all()
        grid = make_grid(env, own_sheet(env, "agent_x", "agent_y", None, None), 4, 0)
        assert grid.between().max() == 3
    pytest.importorskip("dm_control")
    with contextlib.closing(make_env("reacher", 28)) as env:
        grid = make_grid(env, sheets_of(env_entry("reacher"))[0], 6, 0)
        assert grid.between()[..., 0].max() == 3, "half a turn is the farthest"
        assert grid.between()[..., 1].max() == 5
