"""Recorded states are checked before anything expensive begins; whatever is wrong with them is one sentence."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from lewm import cli
from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.understand.states import recorded_states

Change = Callable[[h5py.File], None]


def replace(column: np.ndarray) -> Change:
    def change(file: h5py.File) -> None:
        values = np.broadcast_to(column, (len(file["state"]), *column.shape))
        del file["state"]
        file["state"] = values

    return change


def paint_black(file: h5py.File) -> None:
    for number in range(len(file["pixels"])):
        file["pixels"][number] = 0


WRONG: dict[str, tuple[Change, str]] = {
    "none": (lambda file: file.__delitem__("state"), "no column 'state'"),
    "words": (replace(np.array(b"here")), "not rows of numbers"),
    "missing numbers": (replace(np.array([np.nan, 1.0])), "no finite state at row"),
    "huge numbers": (replace(np.array([1e300, 1.0])), "no finite state at row"),
    "too many": (replace(np.zeros(4)), "states of 4 numbers, but those of its world have 2"),
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.h5"
    collect("tworoom", path, CollectConfig(4, resolution=28, workers=1, frame_stride=5), 4)
    return path


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("verb", ["probe", "notice", "surprise", "imagine"])
def test_wrong_states_are_refused(
    verb: str, wrong: str, debug_run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, sentence = WRONG[wrong]
    shutil.copy(data, tmp_path / "data.h5")
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        del file.attrs["checksums"]  # what is written is meant
        change(file)
    command = f"understand {verb} {debug_run} --data {tmp_path / 'data.h5'} --out {tmp_path / 'out'} --device cpu"
    blocks = ["--blocks=2", "--searches=1", "--windows=2"] if verb == "imagine" else []
    frames = ["--before=0", "--after=0", "--trajectories=2"] if verb == "surprise" else []
    if (verb, wrong) == ("imagine", "none"):  # then it searches for no plans, and says so
        assert cli.run([*command.split(), *blocks]) == 0
        return
    assert cli.run([*command.split(), *blocks, *frames]) == 1
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "data.h5.features").exists(), "no frame was embedded"


def test_a_world_that_nobody_knows_has_any_states(data: Path) -> None:
    with EpisodeStore(data) as store:
        assert recorded_states(store).shape == (store.num_rows, 2)
        rows = store.frame_rows
        np.testing.assert_array_equal(recorded_states(store, rows=rows), store.read_column("state")[rows])
        with pytest.raises(DataError, match="2 numbers, but those of its world have 1"):
            recorded_states(store, ["x"])


def test_frames_that_all_look_alike_are_said(
    debug_run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(data, tmp_path / "data.h5")
    with h5py.File(tmp_path / "data.h5", "r+") as file:
        del file.attrs["checksums"]  # what is written is meant
        paint_black(file)
    small = ["--train", "--steps=2", "--batch=4", "--windows=2", "--blocks=1", "--width=8"]
    for verb, options in (("landscape", []), ("decode", small)):
        command = f"understand {verb} {debug_run} --data {tmp_path / 'data.h5'} --out {tmp_path / 'out'} --device cpu"
        assert cli.run([*command.split(), *options]) == 1
        assert "All embeddings are the same" in capsys.readouterr().err
