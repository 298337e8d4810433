"""metrics.jsonl: every step once, whatever happened to the writer."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import NoReturn

import pytest

from lewm.errors import LewmError
from lewm.train.logs import MetricsLog, read_metrics


def write(directory: Path, first_step: int, steps: range) -> None:
    log = MetricsLog(directory, first_step)
    for step in steps:
        log.write(step, {"loss": float(step)})
    log.close()


def test_a_resumed_log_drops_what_will_be_repeated(tmp_path: Path):
    write(tmp_path, 1, range(1, 8))
    write(tmp_path, 5, range(5, 7))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": s, "loss": float(s)} for s in range(1, 7)]


def test_tensorboard_shows_what_metrics_say(tmp_path: Path):
    """Every step once as well, from the files of two calls."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, 1, range(1, 8))
    write(tmp_path, 5, range(5, 10))
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    assert [(event.step, event.value) for event in board.Scalars("loss")] == [(s, float(s)) for s in range(1, 10)]


def test_a_line_cut_short_is_left_out(tmp_path: Path):
    write(tmp_path, 1, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "lo')
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    write(tmp_path, 4, range(4, 6))
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("damaged", [b'{"stex": 3}', b"3", b'"text"', b"\xff\xfe"])
def test_a_row_that_is_something_else_ends_in_no_traceback(tmp_path: Path, damaged: bytes):
    """A disk that was not asked in time, or an editor."""
    write(tmp_path, 1, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + damaged + b"\n")
    with contextlib.suppress(LewmError):
        write(tmp_path, 3, range(3, 5))
        assert [row["step"] for row in read_metrics(path)] == [1, 2, 3, 4]


def no_json(name: str) -> NoReturn:
    raise AssertionError(f"{name} is no JSON")


def test_what_is_not_finite_is_null_and_stays_so(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1.0, "straightness": NaN}\n')  # as earlier versions wrote it
    log = MetricsLog(tmp_path, 2)
    log.write(2, {"loss": 0.5, "straightness": float("nan"), "val/loss": float("inf")})
    log.close()
    rows = [json.loads(line, parse_constant=no_json) for line in path.read_text().splitlines()]
    assert rows[0] == {"step": 1, "loss": 1.0, "straightness": None}
    assert rows[1] == {"step": 2, "loss": 0.5, "straightness": None, "val/loss": None}
    assert read_metrics(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 0.5}]


def test_no_file_no_rows(tmp_path: Path):
    assert read_metrics(tmp_path / "metrics.jsonl") == []
