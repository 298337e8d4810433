"""A run's record: metrics.jsonl for programs, TensorBoard events for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lewm.files import completing, disk_errors


class MetricsLog:
    """Appends measurements to ``metrics.jsonl`` and to TensorBoard.

    A resumed run repeats the steps after its checkpoint, so their old entries are dropped first: every step appears
    once.
    """

    def __init__(self, directory: Path, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.path = directory / "metrics.jsonl"
        with disk_errors(self.path):
            directory.mkdir(parents=True, exist_ok=True)
            kept = [row for row in read_metrics(self.path) if row["step"] < first_step]
            with completing(self.path) as temporary:
                temporary.write_text("".join(json.dumps(row) + "\n" for row in kept))
            self._file = self.path.open("a")
            self._board = SummaryWriter(str(directory / "tensorboard"), purge_step=first_step)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Record measurements of one step."""
        with disk_errors(self.path):
            self._file.write(json.dumps({"step": step, **values}) + "\n")
            self._file.flush()
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        self._board.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, up to the first line that is none: a crash cuts the last one short."""
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
