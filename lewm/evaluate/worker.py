"""Environments of evaluation episodes in processes of their own, so that slow simulators run while a GPU plans.

A worker holds the environments of its share of the episodes. It is given pickled orders and gives back what happened,
over a pair of sockets. Episodes do not know of one another, so results are the same for any number of workers.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from subprocess import DEVNULL
from typing import Any, NoReturn

from lewm.envs.registry import env_names, register_env
from lewm.envs.workers import start_worker
from lewm.errors import EnvError, LewmError
from lewm.evaluate.worlds import Happened, LocalWorlds, Opening, Order, Setting
from lewm.types import EpisodeSpec

STDERR = 2  # where workers print: what simulators say is no result


class ProcessWorlds:
    """Environments in ``workers`` processes: episode n is with worker n % workers."""

    def __init__(self, setting: Setting, specs: Sequence[EpisodeSpec], workers: int) -> None:
        self._submitted: deque[list[int]] = deque()
        with contextlib.ExitStack() as stack:
            self._workers = [stack.enter_context(contextlib.closing(_Worker())) for _ in range(workers)]
            for i, worker in enumerate(self._workers):
                worker.send((setting, specs[i::workers]))
            openings = [worker.receive() for worker in self._workers]
            self._stack = stack.pop_all()
        self.openings: list[Opening] = [openings[n % workers][n // workers] for n in range(len(specs))]

    def submit(self, orders: Sequence[Order]) -> None:
        count = len(self._workers)
        for i, worker in enumerate(self._workers):
            if share := [replace(order, number=order.number // count) for order in orders if order.number % count == i]:
                worker.send(share)
        self._submitted.append([order.number % count for order in orders])

    def collect(self) -> list[Happened]:
        owners = self._submitted.popleft()
        answers = {i: iter(self._workers[i].receive()) for i in set(owners)}
        return [next(answers[i]) for i in owners]

    def close(self) -> None:
        self._stack.close()


class _Worker:
    """This side of a worker: a process that runs this module, at the other end of a pair of sockets."""

    def __init__(self) -> None:
        self._connection, theirs = multiprocessing.Pipe()
        with theirs:
            end = theirs.fileno()
            self._process = start_worker("lewm.evaluate.worker", str(end), stdin=DEVNULL, stdout=STDERR, pass_fds=[end])

    def send(self, request: Any) -> None:
        with _death_noticed():
            self._connection.send(request)

    def receive(self) -> Any:
        with _death_noticed():
            answer = self._connection.recv()
        if isinstance(answer, str):
            raise EnvError(answer)
        return answer

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._connection.close()


@contextlib.contextmanager
def _death_noticed() -> Iterator[None]:
    try:
        yield
    except (EOFError, OSError) as error:
        remedy = "Evaluate again, with fewer --eval.workers."
        raise EnvError(f"A process with environments died, perhaps for lack of memory. {remedy}") from error


def _work(connection: Connection) -> None:
    """The life of a worker: open the episodes it is given, then execute orders until it is killed."""
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    try:
        setting, specs = requests.get()
        if setting.entry.name not in env_names():  # the parent's program has registered it
            register_env(setting.entry)
        with contextlib.closing(LocalWorlds(setting, specs)) as worlds:
            connection.send(worlds.openings)
            while True:
                worlds.submit(requests.get())
                connection.send(worlds.collect())
    except LewmError as error:
        connection.send(str(error))
    except Exception as error:
        connection.send(f"An environment failed: {error!r}.")


def _receive(connection: Connection, requests: queue.SimpleQueue[Any]) -> NoReturn:
    """Take requests as they come: a parent that waits to send one could never collect an answer."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv())
    os._exit(1)  # the parent has gone


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
