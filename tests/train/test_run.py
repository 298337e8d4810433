"""A run's folder: damage, other datasets, and what is kept. It is never continued into other weights."""

from __future__ import annotations

import errno
import json
import random
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from lewm import checkpoint, files
from lewm.config import CollectConfig, Config
from lewm.data.collect import collect
from lewm.errors import DataError, FileError, LewmError, TrainingError
from lewm.files import only_writer, read_json
from lewm.train.loop import train
from lewm.train.trainer import SilentMonitor

STEPS, STOPPED = 10, 8  # Checkpoints are written after 4, 8 and the last.
FILES = (checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.ACTIONS, checkpoint.OPTIMIZER)


def with_training(config: Config, out: Path, **changes: Any) -> Config:
    return replace(config, out=out, train=replace(config.train, **{"steps": STEPS, **changes}))


def step_folder(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:07d}"


def tensors_of(run: Path, step: int = STEPS) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a run's checkpoint."""
    folder = step_folder(run, step)
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


def assert_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Notes(SilentMonitor):
    """Keeps what it is told, and does something after a step."""

    def __init__(self, when: int = 0, act: Callable[[], object] | None = None) -> None:
        self.notes: list[str] = []
        self._when, self._act = when, act

    def note(self, message: str) -> None:
        self.notes.append(message)

    def step(self, step: int, total: int, values: dict[str, float]) -> None:  # noqa: ARG002
        if step == self._when and self._act:
            self._act()


def terminate() -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.fixture(scope="module")
def undisturbed(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What a calm run of STEPS steps ends with."""
    out = tmp_path_factory.mktemp("calm") / "run"
    train(with_training(debug_config, out))
    return tensors_of(out)


@pytest.fixture(scope="module")
def stopped_run(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with the checkpoints of steps 4 and 8, of ten; not to be changed."""
    out = tmp_path_factory.mktemp("stopped") / "run"
    train(with_training(debug_config, out), monitor=Notes(STOPPED, terminate))
    assert names_in(out / "checkpoints") == ["step_0000004", "step_0000008"]
    return out


@pytest.fixture
def stopped(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


# -- damage --------------------------------------------------------------------------------------------------------


def flip(path: Path, rng: random.Random) -> None:
    """Change one byte of a file; of tensors every other time in the header, which is a small part of it."""
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little") if path.suffix == ".safetensors" else len(content)
    place = rng.randrange(header if rng.random() < 0.5 else len(content))
    content[place] ^= rng.randrange(1, 256)
    path.write_bytes(content)


def is_unharmed(folder: Path, original: Path) -> bool:
    """Whether a changed byte says the same, as one white space in place of another."""
    try:
        same = json.loads((folder / checkpoint.CONFIG).read_text()) == read_json(original / checkpoint.CONFIG)
    except ValueError:
        return False
    return same and all((folder / name).read_bytes() == (original / name).read_bytes() for name in FILES[1:])


@pytest.mark.parametrize("number", range(15))
@pytest.mark.parametrize("name", FILES)
def test_a_byte_that_changed_leads_to_an_older_checkpoint_and_the_same_weights(
    debug_config: Config, stopped_run: Path, stopped: Path, undisturbed: dict[str, torch.Tensor], name: str, number: int
):
    newest = step_folder(stopped, STOPPED)
    flip(newest / name, random.Random(f"{name} {number}"))
    notes = Notes()
    train(with_training(debug_config, stopped), monitor=notes)
    assert_same(tensors_of(stopped), undisturbed)
    if is_unharmed(newest, step_folder(stopped_run, STOPPED)):
        assert f"Continuing {stopped} at step 8." in notes.notes
    else:
        assert f"Continuing {stopped} at step 4." in notes.notes
        assert any(str(newest) in note and name in note for note in notes.notes)


def test_with_every_checkpoint_damaged_a_run_says_so_and_begins_again(
    debug_config: Config, stopped: Path, undisturbed: dict[str, torch.Tensor]
):
    for step in (4, 8):
        (step_folder(stopped, step) / checkpoint.OPTIMIZER).unlink()
    notes = Notes()
    train(with_training(debug_config, stopped), monitor=notes)
    assert [note for note in notes.notes if "optimizer.safetensors is missing" in note] == [
        f"{step_folder(stopped, step) / checkpoint.OPTIMIZER} is missing." for step in (8, 4)
    ]
    assert_same(tensors_of(stopped), undisturbed)


def test_files_of_two_checkpoints_are_not_mixed(
    debug_config: Config, stopped: Path, undisturbed: dict[str, torch.Tensor]
):
    """Each is whole, and not the other's."""
    for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER):
        shutil.copy(step_folder(stopped, 4) / name, step_folder(stopped, 8) / name)
    notes = Notes()
    train(with_training(debug_config, stopped), monitor=notes)
    assert any("model.safetensors does not belong to its config.json" in note for note in notes.notes)
    assert_same(tensors_of(stopped), undisturbed)


@pytest.mark.parametrize("number", range(20))
def test_a_damaged_description_of_a_run_is_refused_or_harmless(
    debug_config: Config, stopped: Path, undisturbed: dict[str, torch.Tensor], number: int
):
    """It has no digest: people may edit it. But the weights are those of the command, or there is one sentence."""
    path = stopped / "config.json"
    flip(path, random.Random(number))
    damaged = path.read_bytes()
    try:
        train(with_training(debug_config, stopped))
    except LewmError:
        assert path.read_bytes() == damaged
        assert names_in(stopped / "checkpoints") == ["step_0000004", "step_0000008"]
    else:
        assert_same(tensors_of(stopped), undisturbed)


# -- another dataset -----------------------------------------------------------------------------------------------


def altered(data: Path | None, target: Path, column: str) -> Path:
    """A copy of a dataset in which one number of a column is another."""
    assert data is not None
    shutil.copy(data, target)
    with h5py.File(target, "r+") as file:
        del file.attrs["checksums"]
        first = file[column][0]
        file[column][0] = 255 - first if column == "pixels" else 0.5 * first
    return target


@pytest.mark.parametrize("column", ["action", "pixels"])
def test_a_run_is_not_continued_on_a_dataset_of_as_many_windows(
    debug_config: Config, stopped: Path, tmp_path: Path, column: str
):
    other = altered(debug_config.data, tmp_path / "other.h5", column)
    before = {path: path.read_bytes() for path in stopped.glob("checkpoints/**/*") if path.is_file()}
    with pytest.raises(TrainingError, match=r"was trained on another dataset.*Continue with the dataset the run began"):
        train(replace(with_training(debug_config, stopped), data=other))
    assert {path: path.read_bytes() for path in stopped.glob("checkpoints/**/*") if path.is_file()} == before


def test_a_dataset_may_move(debug_config: Config, stopped: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor]):
    assert debug_config.data is not None
    moved = Path(shutil.copy(debug_config.data, tmp_path / "moved.h5"))
    train(replace(with_training(debug_config, stopped), data=moved))
    assert_same(tensors_of(stopped), undisturbed)
    assert read_json(stopped / "config.json")["data"] == str(moved)


# -- what is kept --------------------------------------------------------------------------------------------------


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the checkpoints that are written, in order."""
    names: list[str] = []
    honest = checkpoint.write_folder

    def noted(target: Path, fill: Callable[[Path], object]) -> None:
        names.append(target.name)
        honest(target, fill)

    monkeypatch.setattr(checkpoint, "write_folder", noted)
    return names


@pytest.mark.parametrize("step", [4, 7, 8])
def test_no_step_is_saved_twice(debug_config: Config, tmp_path: Path, written: list[str], step: int):
    """Neither when a run stops at a checkpoint, nor when it continues, nor when it had ended."""
    config = with_training(debug_config, tmp_path / "run")
    train(config, monitor=Notes(step, terminate))
    train(config)
    train(config)
    steps = sorted({4, 8, 10, step})
    assert written == [f"step_{number:07d}" for number in steps]


def test_a_folder_of_somebody_else_stays(debug_config: Config, stopped: Path):
    """Whatever it is called."""
    mine = stopped / "checkpoints"
    for name, file in (("step_0000003", "thesis.tex"), ("step_x", "config.json"), ("notes", "config.json")):
        (mine / name).mkdir()
        (mine / name / file).write_text("all my work")
    train(with_training(debug_config, stopped))
    assert names_in(mine) == ["notes", "step_0000003", "step_0000008", "step_0000010", "step_x"]
    assert (mine / "step_0000003" / "thesis.tex").read_text() == "all my work"


def test_a_folder_of_somebody_else_stays_even_with_a_description_of_its_own(debug_config: Config, stopped: Path):
    mine = stopped / "checkpoints" / "step_0000003"
    mine.mkdir()
    (mine / "config.json").write_text('{"optimiser": "mine"}')
    (mine / "thesis.tex").write_text("all my work")
    train(with_training(debug_config, stopped))
    assert (mine / "thesis.tex").read_text() == "all my work"


def test_an_old_checkpoint_that_cannot_be_removed_is_a_note(
    debug_config: Config, stopped: Path, tmp_path: Path, undisturbed: dict[str, torch.Tensor]
):
    """As a link to another disk, which stays as it is."""
    elsewhere = step_folder(stopped, 4).rename(tmp_path / "elsewhere")
    step_folder(stopped, 4).symlink_to(elsewhere)
    notes = Notes()
    result = train(with_training(debug_config, stopped), monitor=notes)
    assert result.steps == STEPS
    said = [note for note in notes.notes if f"{step_folder(stopped, 4)} could not be removed" in note]
    assert len(said) == 1
    assert_same(tensors_of(stopped), undisturbed)
    assert names_in(elsewhere) == sorted(FILES)


# -- one at a time -------------------------------------------------------------------------------------------------


def test_a_run_that_another_process_trains_is_left_alone(debug_config: Config, stopped: Path):
    before = {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()}
    busy = pytest.raises(FileError, match=rf"Another process is training into {stopped}.*--out")
    with only_writer(stopped / ".lock", ""), busy:
        train(with_training(debug_config, stopped))
    assert {path: path.read_bytes() for path in stopped.rglob("*") if path.is_file()} == before
    assert train(with_training(debug_config, stopped)).steps == STEPS
    assert not (stopped / ".lock").exists()


def test_a_place_for_a_run_is_held_from_the_first_moment(debug_config: Config, tmp_path: Path):
    """Also if nothing is there yet; and whoever is refused leaves nothing."""
    with only_writer(tmp_path / "new" / ".lock", ""), pytest.raises(FileError, match="Another process is training"):
        train(with_training(debug_config, tmp_path / "new"))
    assert list((tmp_path / "new").iterdir()) == []


def test_a_place_that_is_taken_is_named_before_the_work(debug_config: Config, stopped: Path, tmp_path: Path):
    """Before frames are read, which can take minutes: here there are too few, which would be said as well."""
    config = with_training(debug_config, stopped, batch_size=10_000)
    with only_writer(stopped / ".lock", ""), pytest.raises(FileError, match="Another process is training"):
        train(config)
    with pytest.raises(TrainingError, match=r"holds another run: train\.batch_size"):
        train(config)
    with pytest.raises(DataError, match="fewer than one batch"):
        train(replace(config, out=tmp_path / "new" / "run"))
    assert not (tmp_path / "new").exists()


def test_a_file_system_without_locks_is_named_before_the_work(
    debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    with pytest.raises(FileError, match=r"The file system of .* has no locks.*another file system"):
        train(with_training(debug_config, tmp_path / "run", batch_size=10_000))
    with pytest.raises(FileError, match="has no locks"):
        collect("tworoom", tmp_path / "d.h5", CollectConfig(10**6))


def test_a_run_that_begins_again_keeps_what_it_saves(
    debug_config: Config, stopped: Path, undisturbed: dict[str, torch.Tensor]
):
    """Damaged checkpoints of later steps do not take the places of new ones."""
    for step in (4, 8):
        (step_folder(stopped, step) / checkpoint.WEIGHTS).write_bytes(b"damaged")
    train(with_training(debug_config, stopped, checkpoint_every=1), monitor=Notes(3, terminate))
    assert names_in(stopped / "checkpoints") == [f"step_000000{step}" for step in (2, 3, 4, 8)]
    notes = Notes()
    train(with_training(debug_config, stopped), monitor=notes)
    assert f"Continuing {stopped} at step 3." in notes.notes
    assert_same(tensors_of(stopped), undisturbed)


def test_what_somebody_kept_in_a_checkpoint_stays(debug_config: Config, stopped: Path):
    """As the results that lewm 0.1 wrote there."""
    (step_folder(stopped, 4) / "evaluation.json").write_text("results")
    train(with_training(debug_config, stopped))
    assert names_in(stopped / "checkpoints") == ["step_0000004", "step_0000008", "step_0000010"]
    assert names_in(step_folder(stopped, 4)) == ["evaluation.json"]
