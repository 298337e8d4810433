"""Batches that are on the device before they are needed.

On a GPU the next batches are gathered, pinned and copied by a thread, on a stream of its own, while the device works on
this one: whether the frames come from its own memory, from the machine's, or from disk, a step finds them there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch

from lewm.types import Batch

AHEAD = 2  # batches that are prepared beforehand


class Batches:
    """The batches of a run, by step, on ``device``.

    Args:
        load: the batch of a step, on any device; a pure function of it.
        steps: how many the run has.
        device: where batches go.

    Attributes:
        ahead: how many are prepared beforehand.
    """

    def __init__(self, load: Callable[[int], Batch], steps: int, device: torch.device) -> None:
        self._load, self._steps, self._device = load, steps, device
        # Elsewhere there is nothing to overlap with.
        self.ahead = AHEAD if device.type == "cuda" else 0
        self._stream = torch.cuda.Stream(device) if self.ahead else None
        self._pool = ThreadPoolExecutor(1, "prefetch")
        self._pending: dict[int, Future[Batch]] = {}

    def __call__(self, step: int) -> Batch:
        """The batch of a step; starts to prepare the ones after it."""
        future = self._pending.pop(step, None)
        batch = future.result() if future else self._prepare(step)
        for later in range(step + 1, min(step + 1 + self.ahead, self._steps)):
            if later not in self._pending:
                self._pending[later] = self._pool.submit(self._prepare, later)
        if self._stream is not None:
            _hand_over(batch, self._stream)
        return batch

    def wait(self) -> None:
        """Return when nothing is being prepared, so that this process's device is left alone."""
        wait(self._pending.values())

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

    def _prepare(self, step: int) -> Batch:
        with torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext():
            prepared = self._load(step).map(self._to_device)
        if self._stream is not None:
            # Waiting is for this thread, which has nothing else to do; the one that trains finds everything done.
            self._stream.synchronize()
        return prepared

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and self._device.type == "cuda" and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


def _hand_over(batch: Batch, stream: torch.cuda.Stream) -> None:
    """Tell the allocator that tensors made on ``stream`` are now used on the current one."""
    current = torch.cuda.current_stream(stream.device)
    for tensor in batch.tensors():
        tensor.record_stream(current)
