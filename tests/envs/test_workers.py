"""How processes that run environments are started; what they do is tested with collection and evaluation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from subprocess import PIPE

import pytest

from lewm.envs.workers import start_worker

PROGRAM = """
import json, os, sys
threads = [os.environ[f"{library}_NUM_THREADS"] for library in ("OMP", "OPENBLAS", "MKL")]
answer = {"heard": sys.stdin.readline(), "arguments": sys.argv[1:], "threads": threads, "session": os.getsid(0)}
print(json.dumps(answer | {"inherited": os.fstat(int(sys.argv[1])).st_ino}))
"""


def test_a_worker_finds_the_callers_modules_and_stands_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_worker.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with (tmp_path / "shared").open("w") as shared:
        number = shared.fileno()
        process = start_worker("own_worker", str(number), "x", stdin=PIPE, stdout=PIPE, pass_fds=[number])
        with process:
            process.stdin.write(b"hello\n")  # and no flush: it waits for the line while its stdin stays open
            answer = json.loads(process.stdout.readline())
        assert process.returncode == 0
        assert answer.pop("inherited") == os.fstat(number).st_ino
    expected = {"heard": "hello\n", "arguments": [str(number), "x"], "threads": ["1"] * 3, "session": process.pid}
    assert answer == expected
