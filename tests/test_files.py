"""Files appear whole, have one writer, and take the place of nothing else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lewm import files
from lewm.errors import FileError
from lewm.files import DATASET, FILM, PICTURE, RESULTS, check_output, check_place, completing, only_writer, replacing

# -- appearing whole -----------------------------------------------------------------------------------------------


def test_a_file_appears_with_its_folder_and_nothing_beside_it(tmp_path: Path):
    with completing(tmp_path / "new" / "a.txt") as temporary:
        temporary.write_text("whole")
        assert not (tmp_path / "new" / "a.txt").exists()
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.txt"]
    assert (tmp_path / "new" / "a.txt").read_text() == "whole"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError(errno.ENOSPC, "No space left on device")])
def test_what_goes_wrong_leaves_what_was_there(tmp_path: Path, error: BaseException | type[BaseException]):
    (tmp_path / "a.txt").write_text("old")

    def fail() -> None:
        with completing(tmp_path / "a.txt") as temporary:
            temporary.write_text("ne")
            raise error

    with pytest.raises((KeyboardInterrupt, ValueError, FileError)):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a.txt": "old"}


def test_a_full_disk_is_named(tmp_path: Path):
    with pytest.raises(FileError, match=r"The disk is full: .*a\.txt.*Free some space"), completing(tmp_path / "a.txt"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_several_files_appear_together_or_not_at_all(tmp_path: Path):
    with pytest.raises(FileError), replacing(tmp_path / "a", tmp_path / "b") as (a, _):
        a.write_text("1")  # and b is forgotten
    assert list(tmp_path.iterdir()) == []
    with replacing(tmp_path / "a", tmp_path / "b") as (a, b):
        a.write_text("1")
        b.write_text("2")
    assert sorted(path.read_text() for path in tmp_path.iterdir()) == ["1", "2"]


def test_a_killed_writer_leaves_nothing_that_stays(tmp_path: Path):
    """Killed, a process cannot clear up; the next one that writes the same file does it, and spares the living."""
    code = f"""
import os, signal
from pathlib import Path
from lewm.files import completing
with completing(Path({str(tmp_path / "a.txt")!r})) as temporary:
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    (leftover,) = tmp_path.iterdir()
    others = leftover.with_name(re.sub(r"-\d+\.tmp$", f"-{os.getppid()}.tmp", leftover.name))
    others.write_text("of a process that is still at it")
    with completing(tmp_path / "a.txt") as temporary:
        temporary.write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {"a.txt", others.name}


def test_a_file_system_that_cannot_wait_for_folders_is_good_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    honest = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        honest(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    files.write_json(tmp_path / "a.json", {"x": 1})
    assert files.read_json(tmp_path / "a.json") == {"x": 1}


def test_numbers_that_json_does_not_have_are_not_written(tmp_path: Path):
    with pytest.raises(ValueError):
        files.write_json(tmp_path / "a.json", {"x": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_json_that_says_its_checksum_is_what_was_written_or_refused(tmp_path: Path):
    path, document = tmp_path / "a.json", {"b": [1, 2.5, None, {"10": True, "9": "x"}], "a": {10: 1, 9: 2}}
    files.write_json(path, document, checked=True)
    assert files.read_json(path) == document | {"a": {"10": 1, "9": 2}}, "the checksum is not part of it"
    whole = path.read_text()
    path.write_text(whole.replace("2.5", "2.6"))
    with pytest.raises(FileError, match=r"a\.json is not what was written\..*remove \"checksum\" from it\."):
        files.read_json(path)
    edited = json.loads(path.read_text())
    del edited["checksum"]
    files.write_json(path, edited)
    assert files.read_json(path)["b"][1] == 2.6


# -- one writer ----------------------------------------------------------------------------------------------------

CONTENDER = """
import sys, time
from pathlib import Path
from lewm.errors import FileError
from lewm.files import only_writer
lock, inside, entries, deadline = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), time.time() + 100
met = 0
while entries and time.time() < deadline:
    try:
        with only_writer(lock, "busy"):
            entries -= 1
            try:
                inside.touch(exist_ok=False)  # atomic: fails if anybody is inside
            except FileExistsError:
                met += 1
                continue
            inside.unlink()
    except FileError:
        pass
print(entries, met)
"""


def contend(folder: Path, processes: int, entries: int) -> None:
    """So many entries of each of these processes, and never two inside."""
    command = [sys.executable, "-c", CONTENDER, str(folder / "lock"), str(folder / "inside"), str(entries)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
    assert [process.communicate()[0].split() for process in running] == [["0", "0"]] * processes
    assert list(folder.iterdir()) == []


def test_two_are_never_inside(tmp_path: Path):
    contend(tmp_path, processes=2, entries=500)


@pytest.mark.slow
def test_two_are_never_inside_in_ten_thousand_entries(tmp_path: Path):
    contend(tmp_path, processes=4, entries=2500)


def test_the_second_is_told(tmp_path: Path):
    def enter() -> None:
        with only_writer(tmp_path / "lock", "Somebody is here."):
            pass

    with only_writer(tmp_path / "lock", ""), pytest.raises(FileError, match=r"Somebody is here\."):
        enter()
    enter()
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_somebody_removed_is_not_taken_from_the_next_holder(tmp_path: Path):
    lock = tmp_path / "lock"
    with contextlib.ExitStack() as second:
        with only_writer(lock, ""):
            lock.unlink()
            second.enter_context(only_writer(lock, ""))
        with pytest.raises(FileError, match="busy"), only_writer(lock, "busy"):
            pass


def test_a_killed_holder_holds_nothing(tmp_path: Path):
    code = f"""
import time
from pathlib import Path
from lewm.files import only_writer
with only_writer(Path({str(tmp_path / "lock")!r}), ""):
    print("in", flush=True)
    time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    holder.stdout.readline()
    with pytest.raises(FileError), only_writer(tmp_path / "lock", "busy"):
        pass
    holder.kill()
    holder.wait()
    deadline = time.monotonic() + 10
    while True:
        try:
            with only_writer(tmp_path / "lock", "busy"):
                break
        except FileError:
            assert time.monotonic() < deadline


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    named = pytest.raises(FileError, match=r"file system of .* has no locks.*another file system")
    with named, only_writer(tmp_path / "lock", "busy"):
        pass


# -- where outputs may go ------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    path = tmp_path / "d.h5"
    path.write_bytes(b"\x89HDF\r\n\x1a\n and so on")
    return path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "config.json").write_text("{}")
    return folder


def test_an_output_is_no_input_however_it_is_named(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "link.h5").symlink_to(dataset)
    (tmp_path / "hard.h5").hardlink_to(dataset)
    monkeypatch.chdir(tmp_path)
    for name in ("d.h5", "link.h5", "hard.h5", "model/../d.h5"):
        (tmp_path / "model").mkdir(exist_ok=True)
        with pytest.raises(FileError, match="is what is read"):
            check_output(Path(name), DATASET, [dataset])


def test_an_output_keeps_to_its_kind(dataset: Path, tmp_path: Path):
    with pytest.raises(FileError, match=r"d\.h5 is to be a PNG picture, whose name ends in \.png"):
        check_output(dataset, PICTURE)
    (tmp_path / "notes.json").write_text('{"my": "notes"}')
    with pytest.raises(FileError, match=r"notes\.json exists and is not results of an evaluation; it stays as it is"):
        check_output(tmp_path / "notes.json", RESULTS)
    (tmp_path / "x.png").symlink_to(dataset)
    with pytest.raises(FileError, match="is not a PNG picture"):
        check_output(tmp_path / "x.png", PICTURE)
    (tmp_path / "folder.gif").mkdir()
    with pytest.raises(FileError, match="is a folder"):
        check_output(tmp_path / "folder.gif", FILM)
    for name, head in (("a.gif", b"GIF89a..."), ("a.mp4", b"\0\0\0 ftypisom"), ("new.gif", None)):
        if head:
            (tmp_path / name).write_bytes(head)
        check_output(tmp_path / name, FILM)


def test_nothing_is_written_into_a_model(model: Path, tmp_path: Path):
    (tmp_path / "way").symlink_to(model)
    for path in (model / "model.safetensors", model / "r.json", model / "a" / "b.json", tmp_path / "way" / "r.json"):
        with pytest.raises(FileError, match=r"lies inside the model .*model|is to be results"):
            check_output(path, RESULTS)
        with pytest.raises(FileError, match="lies inside the model"):
            check_place(path)
    check_output(tmp_path / "r.json", RESULTS, [model])


def test_an_output_is_not_inside_of_what_is_read(tmp_path: Path):
    (tmp_path / "frames").mkdir()
    with pytest.raises(FileError, match=r"lies inside .*frames, which is read"):
        check_output(tmp_path / "frames" / "d.h5", DATASET, [tmp_path / "frames"])
