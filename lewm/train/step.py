"""One step: loss, gradient, clip, optimiser. Plain, or captured once and replayed as a CUDA graph.

A captured step is replayed as a whole on fixed buffers, without Python in between: batch, directions and learning rate
are copied in, losses stay where they were captured. Random numbers are not captured: a replay draws from the device's
generator as it is seeded then, so that dropout remains a function of (seed, step).
"""

from __future__ import annotations

import contextlib
import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lewm.config import TrainConfig
from lewm.errors import TrainingError
from lewm.model.sigreg import SIGReg
from lewm.model.world_model import LeWM
from lewm.train.distributed import Processes
from lewm.train.objective import Losses, lewm_loss
from lewm.types import Batch

M = TypeVar("M", bound=nn.Module)

# Before capturing, so many steps run as usual: libraries allocate and choose their kernels on first use.
PLAIN_STEPS = 3

# From the fastest for 257 tokens of 64 to the one that takes anything.
ATTENTION_KERNELS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@dataclass(frozen=True)
class StepResult:
    """What a step measured; a captured step overwrites it at the next one. finite: bool (), loss and gradient are."""

    losses: Losses
    finite: torch.Tensor


StepFunction = Callable[[Batch, torch.Tensor], StepResult]


def view(module: M) -> M:
    """A copy with the same parameters and children, whose children can be exchanged."""
    copied = copy.copy(module)
    copied._modules = dict(module._modules)
    return copied


def step_precision(settings: TrainConfig, device: torch.device) -> torch.autocast:
    """The precision of a step's arithmetic; weights and optimiser state are always float32."""
    enabled = settings.precision == "bf16" or (settings.precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


def preferred_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Prefer the fastest attention kernel, on CUDA."""
    return sdpa_kernel(ATTENTION_KERNELS, set_priority=True) if device.type == "cuda" else contextlib.nullcontext()


class PlainStep:
    """A step as it is written down. Processes that share a batch take it together.

    Args:
        model: what is trained; it may be a compiled view of it.
        sigreg: the regulariser of the whole batch, over all processes.
        optimizer: over the model's parameters.
        settings: precision, clipping, kernels.
        processes: who shares the batch.
    """

    def __init__(
        self, model: LeWM, sigreg: SIGReg, optimizer: torch.optim.Optimizer, settings: TrainConfig, processes: Processes
    ) -> None:
        self.model, self.sigreg, self.optimizer, self.settings = model, sigreg, optimizer, settings
        self._processes = processes
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, batch: Batch, directions_DM: torch.Tensor) -> StepResult:
        """Train on this process's part of a batch. Nothing in here waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        device = self.model.device
        with preferred_attention(device):
            with step_precision(self.settings, device):
                losses = lewm_loss(self.model, self.sigreg, batch, directions_DM)
            # A batch's loss is the mean of its equal parts' losses, and so is its gradient.
            (losses.total / self._processes.count).backward()
        self._processes.sum_gradients(self._parameters)
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.settings.clip_norm)
        self.optimizer.step()
        # The gradient too: a finite loss can have one that is not, and its step ruins every weight.
        finite = losses.total.detach().isfinite() & norm.isfinite()
        # Detached, also because a graph kept alive would tie a captured graph to the stream of an earlier step.
        return StepResult(losses.detach(), finite)


class CapturedStep:
    """A step that becomes a CUDA graph after its first few calls; all calls need the same shapes.

    Args:
        step: the step to capture; it keeps what it changes (weights, optimiser state) in place.
        quiet: called before capturing; returns when no other thread uses the device.
    """

    def __init__(self, step: StepFunction, quiet: Callable[[], None]) -> None:
        self._step, self._quiet = step, quiet
        self._stream = torch.cuda.Stream()
        self._plain_calls = 0
        self._inputs: tuple[Batch, torch.Tensor] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: StepResult | None = None

    def __call__(self, batch: Batch, directions_DM: torch.Tensor) -> StepResult:
        """Train on a batch: as usual the first times, then by capturing and replaying."""
        inputs = self._load(batch, directions_DM)
        if self._plain_calls < PLAIN_STEPS:
            self._plain_calls += 1
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                result = self._step(*inputs)
            torch.cuda.current_stream().wait_stream(self._stream)
            return result
        if self._graph is None:
            self._capture(*inputs)
        assert self._graph is not None
        assert self._result is not None
        self._graph.replay()
        return self._result

    def _load(self, batch: Batch, directions_DM: torch.Tensor) -> tuple[Batch, torch.Tensor]:
        """Copy a step's inputs to where the captured step reads them."""
        if self._inputs is None:
            self._inputs = batch.map(torch.clone), directions_DM.clone()
        mine, my_directions = self._inputs
        new = (*batch.tensors(), directions_DM)
        for place, tensor in zip((*mine.tensors(), my_directions), new, strict=True):
            place.copy_(tensor, non_blocking=True)
        return self._inputs

    def _capture(self, batch: Batch, directions_DM: torch.Tensor) -> None:
        self._quiet()
        gc.collect()  # an older graph that is freed while this one is captured would spoil it
        torch.cuda.empty_cache()  # a graph takes memory of its own: what the plain steps needed goes back first
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._result = self._step(batch, directions_DM)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TrainingError(f"CUDA could not capture a step: {reason} Train with --train.no-cuda-graph.") from error
        self._graph = graph
