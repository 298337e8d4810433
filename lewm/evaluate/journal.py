"""The plans that an evaluation has made so far. On disk, an interrupted evaluation goes on from them.

A journal is a file of JSON lines: the question that is being answered (model, settings, pairs), then the plans of each
group of episodes as they were made. What the plans did is not kept: a world is a function of its start and of the
actions, so a continued evaluation executes known plans again, which takes seconds, and searches for the missing ones
only.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from lewm.errors import FileError
from lewm.files import disk_errors
from lewm.plan.inputs import Place
from lewm.types import Plan


@dataclass(frozen=True)
class Note:
    """A plan, and the seconds that it took."""

    plan: Plan
    seconds: float

    def to_list(self) -> list[Any]:
        """As plain JSON values, from which ``from_list`` makes the same to the last digit."""
        distances = [finite(distance) for distance in self.plan.distances.tolist()]
        return [self.plan.actions.tolist(), finite(self.plan.cost), distances, self.seconds]

    @staticmethod
    def from_list(values: list[Any]) -> Note:
        """The note that ``to_list`` wrote."""
        actions, cost, distances, seconds = values
        plan = Plan(np.array(actions, np.float32), math.nan if cost is None else cost, np.array(distances, np.float32))
        return Note(plan, seconds)


def finite(value: float) -> float | None:
    """A number as JSON can have it: what is not finite becomes null."""
    return value if math.isfinite(value) else None


class Notes:
    """Plans by their places, in memory only. earlier: how many of them an interrupted evaluation had made."""

    earlier = 0

    def __init__(self) -> None:
        self.by_place: dict[Place, Note] = {}

    @property
    def seconds(self) -> list[float]:
        """What each plan took."""
        return [note.seconds for note in self.by_place.values()]

    def add(self, made: Mapping[Place, Note]) -> None:
        """Note plans that were made together."""
        self.by_place.update(made)


class Journal(Notes):
    """Notes that outlive the process, of ``question``, plain JSON values. It is for the caller to be the only writer.

    Nothing is written before the first plan is added: a command that is refused leaves no trace.
    """

    def __init__(self, path: Path, question: Mapping[str, Any]) -> None:
        super().__init__()
        self.path = path
        self._question, self._valid_bytes = _line(question), 0
        self._file: BinaryIO | None = None
        if path.is_file():
            self._read()

    def _read(self) -> None:
        with disk_errors(self.path), self.path.open("rb") as file:
            first = file.readline()
            if not first.endswith(b"\n") and self._question.startswith(first):  # killed at its first word
                return
            if first != self._question:
                remedy = "Finish that one with its own command or remove the file, or name other results with --out"
                raise FileError(f"{self.path} has notes of another evaluation that was interrupted. {remedy}.")
            self._valid_bytes = file.tell()
            for line in file:
                if not line.endswith(b"\n"):  # the last words of a process that was killed
                    break
                try:
                    notes = {(index, number): Note.from_list(rest) for index, number, *rest in json.loads(line)}
                except (ValueError, TypeError, AttributeError):  # a disk that was not asked in time
                    break
                self.by_place.update(notes)
                self._valid_bytes += len(line)
        self.earlier = len(self.by_place)

    def add(self, made: Mapping[Place, Note]) -> None:
        super().add(made)
        with disk_errors(self.path):
            file = self._file = self._file or self._begin()
            file.write(_line([[*place, *note.to_list()] for place, note in made.items()]))
            file.flush()

    def _begin(self) -> BinaryIO:
        """Open the file behind what was read of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = self.path.open("ab")
        file.truncate(self._valid_bytes)
        if not self._valid_bytes:
            file.write(self._question)
        return file

    def close(self) -> None:
        """Leave it for later."""
        if self._file:
            with contextlib.suppress(OSError):  # of a full disk, which ``add`` has named
                self._file.close()

    def remove(self) -> None:
        """Its question is answered."""
        self.close()
        self.path.unlink(missing_ok=True)


def _line(values: Any) -> bytes:
    return json.dumps(values, allow_nan=False).encode() + b"\n"
