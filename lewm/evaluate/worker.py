"""Environments of evaluation episodes in processes of their own, so that slow simulators run while a GPU plans.

A worker holds the environments of its share of the episodes. Episodes do not know of one another, so results are the
same for any number of workers.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lewm.envs.workers import Worker, know_env
from lewm.errors import EnvError
from lewm.evaluate.worlds import Effect, LocalWorlds, Opening, Order, Setting
from lewm.types import EpisodeSpec

DIED = "A process with environments died, perhaps for lack of memory. Evaluate again, with fewer --eval.workers."


class ProcessWorlds:
    """Environments in ``workers`` processes: episode n is with worker n % workers."""

    def __init__(self, setting: Setting, specs: Sequence[EpisodeSpec], workers: int) -> None:
        self._submitted: deque[list[int]] = deque()
        with contextlib.ExitStack() as stack:
            made = (Worker("lewm.evaluate.worker:answers", EnvError(DIED)) for _ in range(workers))
            self._workers = [stack.enter_context(contextlib.closing(worker)) for worker in made]
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

    def collect(self) -> list[Effect]:
        owners = self._submitted.popleft()
        answers = {i: iter(self._workers[i].receive()) for i in set(owners)}
        return [next(answers[i]) for i in owners]

    def close(self) -> None:
        self._stack.close()


def answers(requests: Iterator[Any]) -> Iterator[Any]:
    """In a worker: the openings of the episodes that come first, then what each round of orders did."""
    setting, specs = next(requests)
    know_env(setting.entry)
    with contextlib.closing(LocalWorlds(setting, specs)) as worlds:
        yield worlds.openings
        for orders in requests:
            worlds.submit(orders)
            yield worlds.collect()
