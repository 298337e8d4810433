"""The rows of matched trajectories: a CSV file for people, and one that grows while trajectories are lived through."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import IO, Self

from lewm.files import Kind, completing, disk_errors


@dataclass(frozen=True)
class Row:
    """One scored frame.

    episode, row: where its trajectory begins in the dataset.  change, kind: what was done.  offset: frames since then.
    step: environment steps since the trajectory's start.  error, difference: see ``surprise.py``.
    """

    episode: int
    row: int
    change: str
    kind: str
    offset: int
    step: int
    error: float
    difference: float


SUM_LETTERS = 16
HEADER = tuple(item.name for item in fields(Row))
MATCHED_ROWS = Kind("rows of matched trajectories", (".csv",), lambda head: head.startswith(_text(HEADER).encode()))
_NOTHING = "nothing"  # in place of a change: an episode in which the changes find no room


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write a CSV file, atomically."""
    with completing(path) as temporary:
        temporary.write_text(_text(HEADER) + "".join(_text(astuple(row)) for row in rows), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """The rows of a file that ``write_rows`` wrote."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_parsed(values) for values in list(csv.reader(file))[1:]]


class RowJournal(contextlib.AbstractContextManager["RowJournal"]):
    """Rows of finished episodes, which outlive the process. It is for the caller to be the only writer.

    Nothing is written before the first episode is added. Each line ends with the beginning of its SHA-256. What a kill
    has cut, or a disk has changed, is dropped: an episode has all its ``rows_of_one`` rows, or is lived through again.
    """

    def __init__(self, path: Path, rows_of_one: int) -> None:
        self.path, self._rows_of_one = path, rows_of_one
        self._episodes: dict[int, list[Row]] = {}
        self._file: IO[bytes] | None = None
        self._valid_bytes = 0
        if path.is_file():
            self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        if self._file:
            with contextlib.suppress(OSError):  # of a full disk, which ``add`` has named
                self._file.close()

    def of(self, episode: int) -> list[Row] | None:
        """The rows of an episode, none where the changes had no room; None: it is not known yet."""
        return self._episodes.get(episode)

    def add(self, episode: int, rows: Sequence[Row]) -> None:
        """Keep an episode."""
        self._episodes[episode] = list(rows)
        kept = rows or [Row(episode, 0, _NOTHING, _NOTHING, 0, 0, 0.0, 0.0)]
        with disk_errors(self.path):
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self.path.open("ab")
                self._file.truncate(self._valid_bytes)
            self._file.write("".join(_summed(_text(astuple(row))) for row in kept).encode())
            self._file.flush()

    def remove(self) -> None:
        """All of it is told elsewhere."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        begun: list[Row] = []
        end = 0
        for line in self.path.read_bytes().splitlines(keepends=True):
            end += len(line)
            try:
                *values, _ = next(csv.reader([line.decode()]))
                row = _parsed(values)
            except (ValueError, TypeError, StopIteration, csv.Error):
                return
            if _summed(_text(astuple(row))).encode() != line:
                return
            begun = [*begun, row] if begun and begun[0].episode == row.episode else [row]
            if len(begun) == self._rows_of_one or row.change == _NOTHING:
                self._episodes[row.episode] = [] if row.change == _NOTHING else begun
                self._valid_bytes, begun = end, []


def _summed(line: str) -> str:
    """A line of CSV with what it is checked by as its last cell."""
    return f"{line[:-1]},{hashlib.sha256(line.encode()).hexdigest()[:SUM_LETTERS]}\n"


def _text(values: Sequence[object]) -> str:
    """One line of CSV."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(values)
    return line.getvalue()


def _parsed(values: list[str]) -> Row:
    episode, row, change, kind, offset, step, error, difference = values
    return Row(int(episode), int(row), change, kind, int(offset), int(step), float(error), float(difference))
