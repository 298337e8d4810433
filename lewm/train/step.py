"""One step: loss, gradient, clip, optimiser. Plain, or captured once and replayed as a CUDA graph.

A captured step is replayed as a whole on fixed buffers, without Python in between: batch, draws and learning rate are
copied in, losses stay where they were captured. Random numbers are not captured: a replay draws from the device's
generator as it is seeded then, so that dropout remains a function of (seed, step).
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention import sdpa_kernel

from lewm.config import TrainConfig
from lewm.errors import TrainingError
from lewm.methods.base import Method
from lewm.model.token_rollout import ATTENTION_KERNELS
from lewm.train.distributed import Processes
from lewm.train.optim import clip_gradients
from lewm.types import Batch, Losses

# Before capturing, so many steps run as usual: libraries allocate and choose their kernels on first use.
PLAIN_STEPS = 3

Draws = dict[str, torch.Tensor]  # the random numbers of a step, by name


@dataclass(frozen=True)
class StepResult:
    """What a step measured; a captured step overwrites it at the next one. finite: bool (), loss and gradient are."""

    losses: Losses
    finite: torch.Tensor


StepFunction = Callable[[Batch, Draws], StepResult]


def step_precision(settings: TrainConfig, device: torch.device) -> torch.autocast:
    """The precision of a step's arithmetic; weights and optimiser state are always float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=step_arithmetic(settings, device.type) == "bf16")


def step_arithmetic(settings: TrainConfig, device_type: str) -> str:
    """What "auto" stands for: "bf16" on CUDA, "float32" elsewhere."""
    auto = "bf16" if device_type == "cuda" else "float32"
    return auto if settings.precision == "auto" else settings.precision


def preferred_attention(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Prefer the fastest attention kernel, on CUDA."""
    return sdpa_kernel(ATTENTION_KERNELS, set_priority=True) if device.type == "cuda" else contextlib.nullcontext()


class PlainStep:
    """A step as it is written down. Processes that share a batch take it together.

    Args:
        method: what is trained; it may be a compiled view of it.
        optimizer: over the method's parameters.
        settings: precision, clipping, kernels.
        processes: who shares the batch.
    """

    def __init__(
        self, method: Method, optimizer: torch.optim.Optimizer, settings: TrainConfig, processes: Processes
    ) -> None:
        self.method, self.optimizer, self.settings = method, optimizer, settings
        self._processes = processes
        self._parameters = [p for group in optimizer.param_groups for p in group["params"]]

    def __call__(self, batch: Batch, draws: Draws) -> StepResult:
        """Train on this process's part of a batch. Nothing in here waits for the device."""
        self.optimizer.zero_grad(set_to_none=True)
        device = self.method.device
        with preferred_attention(device):
            with step_precision(self.settings, device):
                losses = self.method.losses(batch, draws, self._processes)
            # A batch's loss is the mean of its equal parts' losses, and so is its gradient.
            (losses.total / self._processes.count).backward()
        self._processes.sum_gradients(self._parameters)
        norm = clip_gradients(self.optimizer, self.settings.clip_norm)
        self.optimizer.step()
        self.method.after_step()
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
        self._inputs: tuple[Batch, Draws] | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._result: StepResult | None = None

    def __call__(self, batch: Batch, draws: Draws) -> StepResult:
        """Train on a batch: as usual the first times, then by capturing and replaying."""
        inputs = self._load(batch, draws)
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

    def _load(self, batch: Batch, draws: Draws) -> tuple[Batch, Draws]:
        """Copy a step's inputs to where the captured step reads them."""
        if self._inputs is None:
            self._inputs = batch.map(torch.clone), {name: tensor.clone() for name, tensor in draws.items()}
        mine, my_draws = self._inputs
        places, new = (*mine.tensors(), *my_draws.values()), (*batch.tensors(), *draws.values())
        for place, tensor in zip(places, new, strict=True):
            place.copy_(tensor, non_blocking=True)
        return self._inputs

    def _capture(self, batch: Batch, draws: Draws) -> None:
        self._quiet()
        gc.collect()  # an older graph that is freed while this one is captured would spoil it
        torch.cuda.empty_cache()  # a graph takes memory of its own: what the plain steps needed goes back first
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
                self._result = self._step(batch, draws)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TrainingError(f"CUDA could not capture a step: {reason} Train with --train.no-cuda-graph.") from error
        self._graph = graph
