"""Files that appear whole or not at all, have one writer at a time, and never take the place of something else.

Everything that lewm writes goes through here. A new file or folder is made under a temporary name beside its place and
renamed once it is on disk, so an interruption or a full disk leaves what was there before.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lewm.errors import BusyError, FileError

WAIT_INTERVAL = 0.5  # seconds between two looks at a lock that is waited for
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
NO_WAITING = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
MODEL_FILES = ("config.json", "model.safetensors")  # a folder that has both is a model's

# -- appearing whole -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def completing(path: Path) -> Iterator[Path]:
    """A temporary sibling of ``path``, for a file or a new folder, that takes its name when the context ends well.

    Otherwise no trace of it stays, and what had the name before is as it was.
    """
    with replacing(path) as (temporary,):
        yield temporary


@contextlib.contextmanager
def replacing(*paths: Path) -> Iterator[tuple[Path, ...]]:
    """The same for several files, which take their names one after the other when all of them are on disk."""
    temporaries = tuple(temporary_name(path) for path in paths)
    with disk_errors(paths[0]):
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            clear_leftovers(path)
        try:
            yield temporaries
            for temporary in temporaries:
                sync(temporary)
            for temporary, path in zip(temporaries, paths, strict=True):
                temporary.replace(path)
        finally:
            for temporary in temporaries:
                remove(temporary)
        for folder in {path.parent for path in paths}:
            sync_entry(folder)


def temporary_name(path: Path) -> Path:
    """What a file or folder is called until it is complete; if its process dies, the next writer clears it."""
    return path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


def clear_leftovers(path: Path) -> None:
    """Remove what processes of this machine that are gone have begun to write in a place."""
    begin = f".{path.name}.{socket.gethostname()}-"
    for leftover in path.parent.glob(f"{glob.escape(begin)}*.tmp"):
        number = leftover.name.removeprefix(begin).removesuffix(".tmp")
        if number.isdecimal() and not _runs(int(number)):
            remove(leftover)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # somebody else's, but there
    return True


def remove(path: Path) -> None:
    """Remove a file or a whole folder, as far as that goes; an error of its own would hide the one before it."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file, or a folder with all that is in it, is on disk."""
    for inner in path.rglob("*") if path.is_dir() else ():
        sync_entry(inner)
    sync_entry(path)


def sync_entry(path: Path) -> None:
    """Wait until a file's content, or the names that a folder holds, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot be asked to wait for a folder; its files were waited for.
        if not (path.is_dir() and error.errno in NO_WAITING):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a failed write, as to a full or read-only disk, into an error that names the place."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ENOSPC or os.strerror(errno.ENOSPC) in str(error):
            raise FileError(
                f"The disk is full: {path} could not be written; what was there before is unchanged. Free some space "
                "and start again."
            ) from error
        reason = os.strerror(error.errno) if error.errno else error
        raise FileError(f"{path} cannot be written ({reason}). Choose a place that is writable.") from error


@contextlib.contextmanager
def leaving_no_empty_folders(folder: Path) -> Iterator[None]:
    """Remove what is empty in the end of a folder and those around it, if they were not there before."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    try:
        yield
    finally:
        for each in missing:
            with contextlib.suppress(OSError):
                each.rmdir()


# -- JSON and digests ----------------------------------------------------------------------------------------------


CHECKSUM = "checksum"  # in a JSON file: the digest of all else that it says


def write_json(path: Path, document: Any, checked: bool = False) -> None:
    """Write a JSON file atomically; numbers that JSON does not have are refused.

    checked: an object that says its checksum as well, so that ``read_json`` notices whatever changes in it.
    """
    if checked:
        document = {**document, CHECKSUM: _checksum(document)}
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    with completing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read a JSON file; one that says its checksum must be what was written."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} cannot be read: {error}") from error
    if isinstance(document, dict) and CHECKSUM in document and document.pop(CHECKSUM) != _checksum(document):
        remedy = f'Copy it again, or make it again. If you have changed it yourself, remove "{CHECKSUM}" from it'
        raise FileError(f"{path} is not what was written. {remedy}.")
    return document


def _checksum(document: dict[str, Any]) -> str:
    return json_digest(json.loads(json.dumps(document)))  # as it is read: names are texts, and sorted as such


def file_digest(path: Path) -> str:
    """SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def json_digest(document: Any) -> str:
    """SHA-256 of plain JSON values, in whatever order their names come."""
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


# -- one writer ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def only_writer(path: Path, busy: str, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Hold the lock file ``path``; the kernel releases it when this process dies, however it dies.

    busy: what to say when another process holds it.  on_wait: called once instead of that error; then it is waited for.
    """
    try:
        descriptor = _acquire(path, busy)
    except BusyError:
        if on_wait is None:
            raise
        on_wait()
        descriptor = _acquire_patiently(path, busy)
    try:
        yield
    finally:
        # While it is held: whoever has opened this very file finds, once it gets the lock, that the name has another.
        # Unless somebody has removed it by hand: the name may be another holder's by now.
        with contextlib.suppress(OSError):
            if _is_at(descriptor, path):
                path.unlink()
        os.close(descriptor)


def _acquire(path: Path, busy: str) -> int:
    """The descriptor of the file that has this name and that nobody else has locked."""
    while True:
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(descriptor, path):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            raise BusyError(busy) from None
        except OSError as error:
            os.close(descriptor)
            if error.errno in NO_LOCKS:
                remedy = "Choose a place on another file system (on NFS, mount it with locking)"
                raise FileError(f"The file system of {path.parent} has no locks ({error}). {remedy}.") from error
            raise FileError(f"{path} cannot be locked ({error}). Choose another place.") from error
        os.close(descriptor)  # it was removed by the one who held it before


def _acquire_patiently(path: Path, busy: str) -> int:
    """The same, however long it takes. It asks again and again, since a lock that blocks hears no Ctrl-C in Python."""
    while True:
        time.sleep(WAIT_INTERVAL)
        with contextlib.suppress(BusyError):
            return _acquire(path, busy)


def _is_at(descriptor: int, path: Path) -> bool:
    mine = os.fstat(descriptor)
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


# -- where outputs may go ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What an output is. suffixes: that its name may end with, empty: any.  fits: whether a file's first bytes do."""

    name: str
    suffixes: tuple[str, ...]
    fits: Callable[[bytes], bool]


DATASET = Kind("an HDF5 dataset", (".h5", ".hdf5"), lambda head: head.startswith(b"\x89HDF"))
PICTURE = Kind("a PNG picture", (".png",), lambda head: head.startswith(b"\x89PNG"))
FILM = Kind("a film", (".gif", ".mp4"), lambda head: head.startswith(b"GIF8") or head[4:8] == b"ftyp")
PAGE = Kind("an HTML page", (".html",), lambda head: b"<html" in head.lower())
RESULTS = Kind("results of an evaluation", (".json",), lambda head: b'"rates"' in head)
MANIFEST = Kind("a manifest of pairs", (".json",), lambda head: b'"goal_offset"' in head and b'"rates"' not in head)
HEAD_BYTES = 1 << 16


def check_output(path: Path, kind: Kind, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place for a new file where it would take something else's. Links are followed.

    inputs: files and folders that are read to make it.
    """
    if kind.suffixes and path.suffix.lower() not in kind.suffixes:
        raise FileError(f"{path} is to be {kind.name}, whose name ends in {' or '.join(kind.suffixes)}. Rename it.")
    check_place(path, inputs)
    if path.is_dir():
        raise FileError(f"{path} is a folder, where {kind.name} was to be written. Give the name of a file.")
    if path.exists():
        with disk_errors(path), path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head and not kind.fits(head):
            raise FileError(f"{path} exists and is not {kind.name}; it stays as it is. Choose another place.")


def _real(path: Path) -> Path:
    """Where a path leads when links are followed."""
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise FileError(f"{path} leads nowhere ({error}). Choose another place.") from error


def check_place(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuse a place for a new file or folder that is an input, or inside of one, or inside a model's folder."""
    place = _real(path)
    for source in map(Path, inputs):
        real = _real(source)
        if place == real or (place.exists() and real.exists() and place.samefile(real)):
            raise FileError(f"{path} is what is read. Choose another place for what is written.")
        if real in place.parents and real.is_dir():
            raise FileError(f"{path} lies inside {source}, which is read. Choose another place for what is written.")
    for folder in place.parents:
        if all((folder / name).is_file() for name in MODEL_FILES):
            remedy = "whose files stay as they are. Choose another place"
            raise FileError(f"{path} lies inside the model {folder}, {remedy}.")
