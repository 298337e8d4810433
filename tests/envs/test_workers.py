"""Processes that run environments: how they are started, asked and ended. What they do is tested elsewhere."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lewm.envs.workers import Worker, wait_for_answers
from lewm.errors import DataError, EnvError

MODULE = """
import os, sys, time
from lewm.errors import ConfigError

def answers(requests):
    first = next(requests)
    print("noise that is no answer")
    threads = [os.environ[f"{library}_NUM_THREADS"] for library in ("OMP", "OPENBLAS", "MKL")]
    yield {"first": first, "threads": threads, "session": os.getsid(0), "process": os.getpid()}
    for request in requests:
        if request == "refuse":
            raise ConfigError("not like that")
        if request == "fail":
            raise ValueError("broken")
        if request == "unpicklable":
            yield lambda: 0
        time.sleep(request if isinstance(request, float) else 0)
        yield request * 2
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Worker]]:
    """Starts workers that run the module above; after a test they are closed."""
    (tmp_path / "own_worker.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(Worker("own_worker:answers", DataError("It died."))))


def test_a_worker_finds_the_callers_modules_and_stands_alone(start: Callable[[], Worker]):
    worker = start()
    worker.send({"any": ("thing", 1)})
    answer = worker.receive()
    number = worker._process.pid
    assert answer == {"first": {"any": ("thing", 1)}, "threads": ["1"] * 3, "session": number, "process": number}


def test_answers_come_in_the_order_of_requests_and_many_can_wait(start: Callable[[], Worker]):
    """Both ways more than fits into the sockets' buffers: nobody waits for the other for ever."""
    worker = start()
    worker.send(None)
    worker.receive()
    requests = [bytes([i]) * 100_000 for i in range(50)]
    for request in requests:
        worker.send(request)
    assert [worker.receive() for _ in requests] == [2 * request for request in requests]


def test_who_answers_first_is_heard_first(start: Callable[[], Worker]):
    quick, slow = start(), start()
    for worker in (quick, slow):
        worker.send(None)
        worker.receive()
    slow.send(1.0)
    quick.send(0)
    assert wait_for_answers([slow, quick]) == [quick]
    assert (quick.receive(), slow.receive()) == (0, 2.0)


def test_errors_are_carried_over(start: Callable[[], Worker]):
    for request, kind, message in (
        ("refuse", "ConfigError", "not like that"),
        ("fail", "EnvError", r"An environment failed: ValueError\('broken'\)\."),
        ("unpicklable", "EnvError", "An environment failed: .*pickle"),
    ):
        worker = start()
        worker.send(None)
        worker.receive()
        worker.send(request)
        with pytest.raises(Exception, match=message) as caught:
            worker.receive()
        assert type(caught.value).__name__ == kind


def test_a_request_that_the_worker_cannot_understand_is_an_error(
    start: Callable[[], Worker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "only_here.py").write_text("class Thing: pass\n")
    worker = start()
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")  # too late for the worker
    from only_here import Thing  # type: ignore[import-not-found]

    worker.send(Thing())
    with pytest.raises(EnvError, match=r"An environment failed: ModuleNotFoundError.*only_here"):
        worker.receive()


def test_death_is_noticed(start: Callable[[], Worker]):
    worker = start()
    worker.send(None)
    worker.receive()
    worker.send(60.0)
    os.kill(worker._process.pid, signal.SIGKILL)
    assert wait_for_answers([worker]) == [worker]
    with pytest.raises(DataError, match="It died"):
        worker.receive()
    with pytest.raises(DataError, match="It died"):
        worker.send(1)


PARENT = """
import sys, time
from lewm.envs.workers import Worker
from lewm.errors import DataError
workers = [Worker("own_worker:answers", DataError("It died.")) for _ in range(2)]
for worker in workers:
    worker.send(None)
    worker.receive()
    worker.send(60.0)
print(*(worker._process.pid for worker in workers), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
@pytest.mark.usefixtures("start")
def test_workers_end_with_their_parent(tmp_path: Path):
    environ = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environ) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        assert [is_running(pid) for pid in pids] == [True, True]
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie has ended, and waits for the system's first process to notice.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"
