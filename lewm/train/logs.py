"""A run's record: metrics.jsonl for programs, TensorBoard events for people."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
from pathlib import Path
from typing import Any

from lewm.files import completing, disk_errors


class MetricsLog:
    """Appends measurements to ``metrics.jsonl`` and to TensorBoard.

    A resumed run repeats the steps after its checkpoint, so their old entries are dropped first: every step appears
    once. What is not finite is null in the file, since JSON has no such numbers.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        self.path = directory / "metrics.jsonl"
        with disk_errors(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            kept = [row for row in _rows(self.path) if row["step"] < first_step]
            with completing(self.path) as temporary:
                temporary.write_text("".join(map(_line, kept)))
            self._file = self.path.open("a")
            self._board = _Board(directory / "tensorboard", first_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record measurements of one step."""
        with disk_errors(self.path):
            self._file.write(_line({"step": step, **values}))
            self._file.flush()
            self._board.write(step, values)

    def close(self) -> None:
        """Flush and close both files. What did not fit on the disk has been complained of when it was written."""
        for file in (self._file, self._board):
            with contextlib.suppress(OSError):
                file.close()


class _Board:
    """Events for TensorBoard in a new file, on disk when ``write`` returns.

    TensorBoard's own writer has a thread, whose errors nobody can catch.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog
        from tensorboard.summary.writer.record_writer import RecordWriter

        directory.mkdir(exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{time.monotonic_ns()}"
        self._file = RecordWriter((directory / name).open("xb"))
        self._add(file_version="brain.Event:2")
        # What earlier files say of this step and later ones is not shown.
        self._add(step=first_step, session_log=SessionLog(status=SessionLog.START))

    def write(self, step: int, values: dict[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step=step, summary=Summary(value=scalars))

    def _add(self, **what: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._file.write(Event(wall_time=time.time(), **what).SerializeToString())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def _line(row: dict[str, Any]) -> str:
    """A row of ``metrics.jsonl``."""
    plain = {name: None if _is_no_number(value) else value for name, value in row.items()}
    return json.dumps(plain, allow_nan=False) + "\n"


def _is_no_number(value: Any) -> bool:
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, up to the first line that is none: a crash cuts the last one short.

    A measurement that was not finite is left out of its row.
    """
    return [{name: value for name, value in row.items() if not _is_no_number(value)} for row in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            break
        rows.append(row)
    return rows
