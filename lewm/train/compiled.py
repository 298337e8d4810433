"""Compiling what a method says is worth it, while the data is still being read.

What lies between the compiled parts is little work, and contains what several processes say to one another.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lewm.config import Config, TrainConfig
from lewm.methods.base import Method
from lewm.train.step import preferred_attention, step_precision
from lewm.types import ALONE, Batch, Inputs

# What the compiler remarks on and nobody can act on: some sums are float32 on purpose, the other choice is its own.
_REMARKS = (r"\s*Online softmax is disabled on the fly", r"\s*TensorFloat32 tensor cores for float32")


def wants_compiling(settings: TrainConfig, device: torch.device) -> bool:
    """Whether the settings ask for compilation on this device."""
    return device.type == "cuda" if settings.compile == "auto" else settings.compile != "off"


def compile_parts(method: Method, backend: str = "inductor") -> Method:
    """A view with compiled parts: it shares every parameter and buffer with the original, which stays as it is.

    Validation and checkpoints use the method itself, so that no other shape or mode is ever compiled.
    """
    for remark in _REMARKS:
        warnings.filterwarnings("ignore", remark, UserWarning, r"torch\._inductor")

    def compiled(part: Any) -> Any:
        return torch.compile(part, fullgraph=True, dynamic=False, backend=backend)

    return method.compiled(compiled)


class Compilation:
    """Compiles a step's parts in a thread of its own, by computing the loss and gradient of an empty batch."""

    def __init__(self, method: Method, config: Config) -> None:
        self._error: BaseException | None = None
        self._seconds = 0.0
        # Both are properties of the thread that asks, and torch.compile takes note of them.
        threads = torch.get_num_threads()

        def work() -> None:
            started = time.perf_counter()
            try:
                torch.set_num_threads(threads)
                if method.device.type == "cuda":
                    torch.cuda.set_device(method.device)
                _exercise(method, config.train)
            except BaseException as error:  # raised again by wait()
                self._error = error
            self._seconds = time.perf_counter() - started

        self._begun = time.perf_counter()
        # A daemon: whoever interrupts, or has named the wrong dataset, need not wait for the compiler.
        self._thread = threading.Thread(target=work, name="compile", daemon=True)
        self._thread.start()

    def wait(self) -> float:
        """Return once everything is compiled, with the seconds it took."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # steps run on other streams, which could not use what compiling has taken
        return self._seconds

    def report(self, note: Callable[[str], None]) -> None:
        """Wait, and say how long it took."""
        seconds = self.wait()
        waited = time.perf_counter() - self._begun
        note(f"Compiled in {seconds:.0f} s while the data was read; {waited:.0f} s in all before the start.")


def _exercise(method: Method, settings: TrainConfig) -> None:
    """Loss and gradient as a step computes them; the method is left as it was."""
    device = method.device
    batch = empty_batch(method.inputs, settings.batch_size).map(lambda tensor: tensor.to(device))
    before = [buffer.clone() for buffer in method.buffers()]
    with preferred_attention(device):
        with step_precision(settings, device):
            losses = method.losses(batch, method.draws(0, 0, device), ALONE)
        torch.autograd.grad(losses.total, [p for p in method.parameters() if p.requires_grad], allow_unused=True)
    with torch.no_grad():
        for buffer, value in zip(method.buffers(), before, strict=True):
            buffer.copy_(value)


def empty_batch(inputs: Inputs, size: int) -> Batch:
    """A batch of black frames and zero actions as a method's windows hold them, of pixels only."""
    assert inputs.image_size is not None
    frame = (inputs.image_size, inputs.image_size, 3)
    pixels = torch.zeros((size, inputs.frames, *frame), dtype=torch.uint8)
    actions = torch.zeros(size, inputs.frames, inputs.frame_skip, inputs.action_dim)
    goals = {name: torch.zeros((size, *frame), dtype=torch.uint8) for name in inputs.goals}
    steps = {name: torch.zeros(size, dtype=torch.int64) for name in inputs.goals}
    return Batch(actions, pixels, goals=goals, steps=steps)
