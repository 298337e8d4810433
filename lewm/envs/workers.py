"""Processes that run environments. Collection and evaluation start theirs, and talk to them, in the same way.

A worker answers requests, both pickled, over a pair of sockets. It lives in a session of its own, where Ctrl-C does not
reach it, and ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import pickle
import queue
import sys
import threading
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any, NoReturn

from lewm.envs.registry import EnvEntry, env_names, register_env
from lewm.errors import EnvError, LewmError

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
STDERR = 2  # where workers print: what simulators say is no answer


class Worker:
    """This side of a worker. Close it when it is not needed any more: it is killed, whatever it does.

    answers: "module:function" of a generator that takes an iterator of requests and yields answers, in the worker.
    died: what is raised when the process is gone.
    """

    def __init__(self, answers: str, died: LewmError) -> None:
        self._died = died
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            self._process = _start(answers, theirs.fileno())

    def send(self, request: Any) -> None:
        """Have a request answered, after those before it."""
        with self._death_noticed():
            self._connection.send(request)

    def receive(self) -> Any:
        """The next answer; what went wrong in the worker is raised here."""
        with self._death_noticed():
            answer = self._connection.recv()
        if isinstance(answer, LewmError):
            raise answer
        return answer

    def close(self) -> None:
        """Kill the process, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    @contextlib.contextmanager
    def _death_noticed(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._died from error


def wait_for_answers(workers: Sequence[Worker]) -> list[Worker]:
    """Those of the workers that have answered, or died, as soon as there is one."""
    ready = wait([worker._connection for worker in workers])
    return [worker for worker in workers if worker._connection in ready]


def know_env(entry: EnvEntry) -> None:
    """For a worker: make an environment known that the parent's program has registered."""
    env_names()  # imports the user's modules, which may register it by themselves
    register_env(entry)


def _start(answers: str, descriptor: int) -> Popen[bytes]:
    """A process that serves the socket ``descriptor``, on one thread. (``multiprocessing`` would run the script again.)

    It finds the modules that the caller finds.
    """
    command = [sys.executable, "-u", "-P", "-m", "lewm.envs.workers", answers, str(descriptor)]
    environ = {**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
    streams: dict[str, Any] = {"stdin": DEVNULL, "stdout": STDERR, "pass_fds": [descriptor]}
    return Popen(command, env=environ, start_new_session=True, **streams)


def _serve(answers: str, descriptor: int) -> None:
    """The life of a worker: answer until it is killed, or until something goes wrong, which is the last answer."""
    connection, requests = Connection(descriptor), queue.SimpleQueue[bytes]()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    module, _, name = answers.partition(":")
    try:
        for answer in getattr(importlib.import_module(module), name)(map(pickle.loads, iter(requests.get, None))):
            connection.send(answer)
    except LewmError as error:
        connection.send(error)
    except Exception as error:
        connection.send(EnvError(f"An environment failed: {error!r}."))


def _receive(connection: Connection, requests: queue.SimpleQueue[bytes]) -> NoReturn:
    """Take requests as they come: a parent that waits to send one could never receive an answer."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv_bytes())
    os._exit(1)  # the parent has gone


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
