"""Imagined futures: their errors are those there are, under recorded actions and under plans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from lewm.config import Config
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError
from lewm.methods.lewm import LeWM
from lewm.understand import imagine as verb
from lewm.understand.imagine import ImagineSettings, by_step, choose_windows, imagined, roll_out
from lewm.understand.subject import Subject, open_subject

SMALL = ImagineSettings(blocks=2, windows=6, searches=2)


@pytest.fixture
def store(debug_config: Config) -> Iterator[EpisodeStore]:
    assert debug_config.data is not None
    with EpisodeStore(debug_config.data) as store:
        yield store


@pytest.fixture(scope="module")
def subject(debug_run: Path) -> Subject:
    return open_subject(debug_run, "cpu")


def real_paths() -> torch.Tensor:
    """Of 5 windows, 2 + 3 frames."""
    return torch.randn(5, 5, 4, generator=torch.Generator().manual_seed(0)).cumsum(1)


def test_who_knows_the_future_makes_no_error() -> None:
    real = real_paths()
    for row in by_step(real, real[:, 2:], 2):
        assert (row["median"], row["mistaken"]) == (0, 0)
        assert row["still"] > 0
        assert row["far"] > 0


def test_who_imagines_that_nothing_moves_has_the_error_of_that() -> None:
    real = real_paths()
    rows = by_step(real, real[:, 1:2].expand(-1, 3, -1), 2)
    for step, row in enumerate(rows):
        expected = (real[:, 2 + step] - real[:, 1]).square().sum(-1).median().item()
        assert row["median"] == row["still"] == pytest.approx(expected)


def test_who_takes_one_window_for_the_next_is_always_mistaken() -> None:
    real = real_paths()
    assert all(row["mistaken"] == 1 for row in by_step(real, real.roll(1, 0)[:, 2:], 2))


def test_rollouts_are_the_models(subject: Subject, store: EpisodeStore) -> None:
    windows = choose_windows(subject, store, SMALL)
    real, guessed = roll_out(subject, store, windows, lambda _: None)
    model = subject.model
    assert isinstance(model, LeWM)
    with torch.inference_mode():
        z = model.encode(torch.from_numpy(store.read_frames(windows.rows[0])))
        blocks = model.normalise_actions(torch.from_numpy(windows.actions[0]))
        past = model.history - 1
        ahead = model.rollout(z[None, : past + 1], blocks[None, :past], blocks[None, None, past:])[0, 0]
    torch.testing.assert_close(real[0], z, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(guessed[0], ahead, rtol=1e-4, atol=1e-4)


def test_windows_are_of_as_many_episodes_as_there_are(subject: Subject, store: EpisodeStore) -> None:
    windows = choose_windows(subject, store, SMALL)
    episodes = np.searchsorted(store.offsets, windows.rows, side="right") - 1
    assert (episodes == episodes[:, :1]).all(), "no window crosses from one episode into another"
    assert len(set(episodes[:, 0])) == 6
    assert (np.diff(windows.rows) == subject.model.frame_skip).all()
    np.testing.assert_array_equal(windows.actions[0, 0, 0], store.actions[windows.rows[0, 0]])
    assert np.isfinite(windows.actions).all()


def test_plans_are_executed_and_all_is_written(
    subject: Subject, store: EpisodeStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = imagined(subject, store, SMALL, tmp_path, None)
    plans = {row["kind"]: row for row in found.numbers["plans"]}
    assert list(plans) == ["recorded actions", "random actions", "a search's"]
    # Recorded actions lead to the recorded frame, drawn by the same simulator.
    assert plans["recorded actions"]["real"] == pytest.approx(0, abs=1e-6)
    assert plans["recorded actions"]["reached"] == 2
    assert plans["random actions"]["real"] > 0
    json.loads((tmp_path / "imagine.json").read_text(), parse_constant=pytest.fail)
    assert (tmp_path / "imagine.png").stat().st_size > 5000
    monkeypatch.setattr(verb, "imagine", None)
    assert imagined(subject, store, SMALL, tmp_path, None) == found


def test_what_cannot_be_asked_is_refused(subject: Subject, store: EpisodeStore) -> None:
    with pytest.raises(DataError, match="fewer --blocks"):
        choose_windows(subject, store, ImagineSettings(blocks=99))
    for wrong in ({"blocks": 0}, {"windows": 1}, {"windows": 4, "searches": 5}):
        with pytest.raises(ConfigError, match=r"imagine\."):
            ImagineSettings(**wrong)
