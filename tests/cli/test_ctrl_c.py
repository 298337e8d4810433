"""Ctrl-C at any moment of a command's start, while torch is being imported as well: one line, status 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from lewm.config import Config

PATIENCE = 5.0  # seconds in which it must be over
# What Python itself needs before it runs anything of ours: until then a signal ends it without a word.
BEFORE_OURS = 0.2


def training(data: object, out: Path) -> list[str]:
    return [sys.executable, "-m", "lewm", "train", "debug", f"--data={data}", f"--out={out}", "--train.steps=100000"]


def interrupted(command: list[str], after: float, number: int = signal.SIGINT) -> tuple[int, str, float]:
    """Status, stderr, and seconds until the end of a command that gets a signal so many seconds after its start."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, **streams)  # type: ignore[call-overload]
    time.sleep(after)
    process.send_signal(number)
    sent = time.monotonic()
    try:
        _, said = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        return 0, process.communicate()[1] + "(never ended)", 30.0
    return process.returncode, said, time.monotonic() - sent


def wrong(command: list[str], moments: list[float], number: int = signal.SIGINT) -> list[tuple[float, object]]:
    """The moments at which a signal was not followed by a single line and status 130, soon."""
    found: list[tuple[float, object]] = []
    for moment in moments:
        status, said, took = interrupted(command, moment, number)
        if status != 130 or len(said.splitlines()) != 1 or "Interrupted" not in said or took > PATIENCE:
            found.append((moment, (status, round(took, 2), said[-1500:])))
    return found


@pytest.mark.timeout(120)
def test_a_few_moments_of_a_start(debug_config: Config, tmp_path: Path) -> None:
    assert wrong(training(debug_config.data, tmp_path / "run"), [0.3, 0.8, 1.4]) == []


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_ninety_moments_of_a_start(debug_config: Config, tmp_path: Path) -> None:
    moments = np.random.default_rng(0).uniform(BEFORE_OURS, 6.0, 90).round(3).tolist()
    assert wrong(training(debug_config.data, tmp_path / "run"), moments) == []
    assert wrong(training(debug_config.data, tmp_path / "run"), moments[:20], signal.SIGTERM) == []
