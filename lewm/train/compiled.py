"""The parts of a step that are worth compiling, and compiling them while the data is still being read.

The blocks of encoder and predictor, what the encoder does before and after them, and SIGReg's characteristic function
are compiled each as one graph. Blocks of a kind share their code, so that twelve of them take the compiler no longer
than one. What lies between is little work, and contains what several processes say to one another.
"""

from __future__ import annotations

import threading
import time
import warnings
from typing import Any

import torch
from torch import nn

from lewm.config import Config, TrainConfig
from lewm.model.sigreg import SIGReg
from lewm.model.world_model import LeWM
from lewm.train.objective import lewm_loss
from lewm.train.step import preferred_attention, step_precision, view
from lewm.types import Batch

# What the compiler remarks on and nobody can act on: SIGReg's sums are float32 on purpose, the other choice is its own.
_REMARKS = (r"\s*Online softmax is disabled on the fly", r"\s*TensorFloat32 tensor cores for float32")


def wants_compiling(settings: TrainConfig, device: torch.device) -> bool:
    """Whether the settings ask for compilation on this device."""
    return device.type == "cuda" if settings.compile == "auto" else settings.compile != "off"


def compile_parts(model: LeWM, sigreg: SIGReg, backend: str = "inductor") -> tuple[LeWM, SIGReg]:
    """Compiled views: they share every parameter and buffer with the originals, which stay as they are.

    Validation and checkpoints use the model itself, so that no other shape or mode is ever compiled.
    """
    for remark in _REMARKS:
        warnings.filterwarnings("ignore", remark, UserWarning, r"torch\._inductor")

    def compiled(part: Any) -> Any:
        return torch.compile(part, fullgraph=True, dynamic=False, backend=backend)

    fast = view(model)
    fast.encoder, fast.predictor = view(model.encoder), view(model.predictor)
    fast.encoder.embed = compiled(model.encoder.embed)  # type: ignore[method-assign]
    fast.encoder.summary = compiled(model.encoder.summary)  # type: ignore[method-assign]
    for part, original in ((fast.encoder, model.encoder), (fast.predictor, model.predictor)):
        part.blocks = nn.ModuleList(compiled(block) for block in original.blocks)
    fast_sigreg = view(sigreg)
    fast_sigreg.characteristic_function = compiled(sigreg.characteristic_function)
    return fast, fast_sigreg


class Compilation:
    """Compiles a step's parts in a thread of its own, by computing the loss and gradient of an empty batch."""

    def __init__(self, model: LeWM, sigreg: SIGReg, config: Config) -> None:
        self._error: BaseException | None = None
        self._seconds = 0.0
        # Both are properties of the thread that asks, and torch.compile takes note of them.
        threads = torch.get_num_threads()

        def work() -> None:
            started = time.perf_counter()
            try:
                torch.set_num_threads(threads)
                if model.device.type == "cuda":
                    torch.cuda.set_device(model.device)
                _exercise(model, sigreg, config)
            except BaseException as error:  # raised again by wait()
                self._error = error
            self._seconds = time.perf_counter() - started

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


def _exercise(model: LeWM, sigreg: SIGReg, config: Config) -> None:
    """Loss and gradient as a step computes them; the model is left as it was."""
    device, shape = model.device, config.model
    windows = (config.train.batch_size, shape.history + 1)
    pixels = torch.zeros((*windows, model.image_size, model.image_size, 3), dtype=torch.uint8, device=device)
    actions = torch.zeros((*windows, shape.frame_skip, shape.action_dim), device=device)
    directions_DM = sigreg.directions(shape.embed_dim, 0, device)
    before = [buffer.clone() for buffer in model.buffers()]
    with preferred_attention(device):
        with step_precision(config.train, device):
            losses = lewm_loss(model, sigreg, Batch(actions, pixels), directions_DM)
        torch.autograd.grad(losses.total, [p for p in model.parameters() if p.requires_grad])
    with torch.no_grad():
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
