"""`lewm data show` writes films, and says what it cannot show."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lewm import cli
from lewm.data.formats.show import show
from lewm.data.store import write_episodes
from lewm.errors import DataError, FileError
from lewm.video import Mp4Reader

WriteTiny = Callable[..., Path]


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Two episodes of grey frames, episode e of 5 + e rows, in which frame i has the grey 40·i + 10·e."""

    def episode(number: int) -> dict[str, np.ndarray]:
        length = 5 + number
        grey = (40 * np.arange(length) + 10 * number).astype(np.uint8)
        pixels = np.broadcast_to(grey[:, None, None, None], (length, 16, 16, 3))
        return {"pixels": pixels, "action": np.zeros((length, 1), np.float32)}

    path = tmp_path / "grey.h5"
    write_episodes(path, map(episode, range(2)), {})
    return path


def test_a_gif_has_the_frames_of_the_episode(dataset: Path) -> None:
    out = show(dataset, episode=1, fps=20)
    assert out == dataset.with_name("grey.episode1.gif")
    with Image.open(out) as gif:
        assert gif.n_frames == 6
        assert gif.info["duration"] == 50
        for i in range(6):
            gif.seek(i)
            assert gif.convert("RGB").getpixel((8, 8)) == (40 * i + 10,) * 3


def test_an_mp4_has_the_frames_of_the_episode(dataset: Path, tmp_path: Path) -> None:
    out = show(dataset, 0, tmp_path / "new" / "film.mp4", fps=5)
    with Mp4Reader(out) as reader:
        frames = np.stack(list(reader.read(np.arange(5) / 5, tolerance=0.01)))
    assert frames.shape == (5, 16, 16, 3)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), 40 * np.arange(5), atol=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"episode": 2}, r"has episodes 0 to 1, not 2"),
        ({"episode": -1}, r"has episodes 0 to 1, not -1"),
        ({"episode": 0, "out": "film.avi"}, r"\.gif or \.mp4"),
        ({"episode": 0, "fps": 0}, "between 1 and 100, got 0"),
    ],
)
def test_mistakes_are_explained_and_leave_nothing(dataset: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises((DataError, FileError), match=message):
        show(dataset, **options)  # type: ignore[arg-type]
    assert [path.name for path in dataset.parent.iterdir()] == ["grey.h5"]


def test_a_film_takes_no_other_files_place(dataset: Path, tmp_path: Path) -> None:
    link, notes, odd = tmp_path / "link.gif", tmp_path / "notes.gif", tmp_path / "dataset.gif"
    link.symlink_to(dataset)
    notes.write_text("not a film")
    odd.write_bytes(dataset.read_bytes())
    for source, out in ((dataset, link), (dataset, notes), (odd, odd), (dataset, odd)):
        with pytest.raises(FileError, match="Choose another place"):
            show(source, 0, out)
    assert odd.read_bytes() == dataset.read_bytes()
    assert (notes.read_text(), link.is_symlink()) == ("not a film", True)
    assert show(dataset, 0, show(dataset, 1, tmp_path / "film.gif")).is_file(), "a film may take a film's place"


def test_a_missing_package_is_named(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(DataError, match=r"'av'.*pip install 'lewm\[lerobot\]'"):
        show(dataset, 0, dataset.with_name("film.mp4"))
    assert [path.name for path in dataset.parent.iterdir()] == ["grey.h5"]


def test_a_place_that_cannot_be_written_is_named(dataset: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileError, match="cannot be written"):
        show(dataset, 0, tmp_path / "file" / "film.gif")


def test_frames_of_a_file_with_some_only(tmp_path: Path) -> None:
    path = tmp_path / "strided.h5"
    pixels = np.zeros((3, 8, 8, 3), np.uint8)
    episode = {"pixels": pixels, "action": np.zeros((7, 1), np.float32), "frame_step": np.array([1, 3, 5])}
    write_episodes(path, [episode], {"frame_stride": 2})
    with Image.open(show(path, 0)) as gif:
        # Equal pictures become one that stays longer.
        assert gif.info["duration"] == 300


def test_the_command_line(dataset: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["data", "show", str(dataset), "--episode", "1"]) == 0
    assert "Film: " in capsys.readouterr().out
    assert cli.run(["data", "show", str(dataset), "--episode", "7"]) == 1
    assert "episodes 0 to 1" in capsys.readouterr().err
    assert cli.run(["data", "shw"]) == 1
    assert "Did you mean 'show'?" in capsys.readouterr().err
