"""Several processes, one run: `torchrun --nproc-per-node N -m lewm train ...`.

A batch is divided among the processes in equal parts, and everything that looks at a whole batch still does: what a
method's losses take the mean of and BatchNorm's statistics are averaged over all processes, with gradients. What is
left is a sum over windows, so summing the processes' gradients gives the gradient of one process on the whole batch, to
rounding.

Only the first process writes files and says things. Others hear from it, over the network, what a checkpoint held.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm

from lewm.errors import ConfigError, LewmError, TrainingError
from lewm.model.device import resolve_device

T = TypeVar("T")
# Long enough for one process to read a large dataset while the others wait for it.
TIMEOUT = timedelta(minutes=60)


@dataclass(frozen=True)
class Processes:
    """The processes of a run, seen from one of them. The default is a run in a single process.

    rank: this process, from 0.  count: all of them.  host: the group over which they talk about other things than
    tensors on the device.
    """

    rank: int = 0
    count: int = 1
    host: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Processes:
        return self  # a copy of a model talks to the same processes

    def part_of(self, batch_size: int) -> slice:
        """Which windows of a batch are this process's."""
        if batch_size % self.count:
            raise ConfigError(
                f"train.batch_size ({batch_size}) must be a multiple of the {self.count} processes, which divide each "
                f"batch among them. Use {batch_size - batch_size % self.count or self.count} or another number of them."
            )
        size = batch_size // self.count
        return slice(self.rank * size, (self.rank + 1) * size)

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all processes, differentiable on each of them."""
        return x if self.count == 1 else cast(torch.Tensor, _SumOverProcesses.apply(x)) / self.count

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace each gradient by its sum over all processes."""
        if self.count == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        # One message instead of hundreds; what is copied is small beside the activations.
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        _all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        torch._foreach_copy_(gradients, [part.view_as(g) for part, g in zip(parts, gradients, strict=True)])

    @torch.no_grad()
    def concatenate(self, x: torch.Tensor) -> torch.Tensor:
        """All processes' tensors, of one shape, along the first dimension."""
        if self.count == 1:
            return x
        with _lost_contact():
            dist.all_gather(parts := [torch.empty_like(x) for _ in range(self.count)], x.contiguous())
        return torch.cat(parts)

    def gather(self, value: T) -> list[T]:
        """A picklable object of each process, the same list everywhere."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with _lost_contact():
            dist.all_gather_object(values, value, group=self.host)
        return values

    def from_first(self, value: T) -> T:
        """The first process's object, everywhere."""
        if self.count == 1:
            return value
        with _lost_contact():
            dist.broadcast_object_list(box := [value], src=0, group=self.host)
        return box[0]

    def any(self, flag: bool) -> bool:
        """Whether any process says yes. Waits for the other processes, but for no device."""
        if self.count == 1:
            return flag
        vote = torch.tensor([int(flag)])
        with _lost_contact():
            dist.all_reduce(vote, op=dist.ReduceOp.MAX, group=self.host)
        return bool(vote.item())

    def together(self, action: Callable[[], T]) -> T:
        """Run ``action`` on each; where it fails on any, all of them end, and the first says why."""
        if self.count == 1:
            return action()
        error: LewmError | None = None
        try:
            result = action()
        except LewmError as problem:
            error = problem
        messages = self.gather(str(error) if error else None)
        failed = [rank for rank, message in enumerate(messages) if message is not None]
        if failed:
            self.fail(error or TrainingError(f"Process {failed[0]}: {messages[failed[0]]}"))
        return result

    def fail(self, error: LewmError) -> NoReturn:
        """End this process for a reason that all of them have; only the first gives it."""
        if self.is_first:
            raise error
        raise SystemExit(1)

    def check_agreement(self, what: str, facts: dict[str, Any]) -> None:
        """End the run unless all processes have the same facts; the message names the ones that differ."""
        everyone = self.gather(facts)
        for rank, theirs in enumerate(everyone):
            names = sorted(everyone[0].keys() | theirs.keys())
            differ = [
                f"{n} ({everyone[0].get(n)} / {theirs.get(n)})" for n in names if everyone[0].get(n) != theirs.get(n)
            ]
            if differ:
                self.fail(
                    TrainingError(
                        f"Processes 0 and {rank} do not have the same {what}: {', '.join(differ)}. Start all of them "
                        "with the same command and the same files."
                    )
                )


SINGLE = Processes()


def launched_rank() -> int:
    """This process's number among those that torchrun started, 0 without torchrun."""
    return _launched()[0]


def _launched() -> tuple[int, int]:
    """This process's number, and how many torchrun started; (0, 1) without torchrun."""
    names = ("RANK", "WORLD_SIZE")
    if missing := [name for name in names if name not in os.environ]:
        if len(missing) == 1:
            (there,) = {*names} - {*missing}
            raise TrainingError(
                f"{there} is set and {missing[0]} is not, so it is unclear who takes part in this run. Unset {there} "
                "to train in one process, or start several with torchrun."
            )
        return 0, 1
    rank, count = (_number_of(name) for name in names)
    if rank >= count:
        raise TrainingError(
            f"RANK must be less than WORLD_SIZE ({count}), got {rank}. Start the processes with torchrun."
        )
    return rank, count


def _number_of(name: str, default: int = 0) -> int:
    """A number that torchrun passes on in the environment."""
    text = os.environ.get(name, str(default))
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise TrainingError(f"{name} must be a number from 0 up, got {text!r}. Start the processes with torchrun.")
    return int(text)


def restarts() -> int:
    """How often torchrun has started this run again, after it lost a process."""
    return _number_of("TORCHELASTIC_RESTART_COUNT")


@contextlib.contextmanager
def join_processes(device: str) -> Iterator[tuple[Processes, torch.device]]:
    """Meet the other processes that torchrun started, if it did; yields them and the device to use here."""
    if _launched()[1] == 1:
        place = resolve_device(device)
        if place.type == "cuda" and place.index is not None:
            torch.cuda.set_device(place)
        yield SINGLE, place
        return
    try:
        place = _local_device(device)
    except LewmError:
        if _number_of("LOCAL_RANK") != 0:
            raise SystemExit(1) from None  # the first process of this machine says why
        raise
    if place.type == "cuda":
        torch.cuda.set_device(place)
    try:
        yield _hearing_signals(lambda: _meet("nccl" if place.type == "cuda" else "gloo")), place
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _hearing_signals(action: Callable[[], T]) -> T:
    """What ``action`` returns, from a thread of its own: one that waits in C++ for other processes hears no Ctrl-C."""
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def act() -> None:
        try:
            answers.put((action(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=act, daemon=True).start()
    result, error = answers.get()
    if error is not None:
        raise error
    return cast(T, result)


def _meet(backend: str) -> Processes:
    try:
        store, rank, count = next(rendezvous("env://", timeout=TIMEOUT))
        # torchrun keeps the store when it starts a run again, and in it the addresses of processes that are gone.
        # Machines count their restarts each for itself: several of them need a new store (docs/guide/train.md).
        if os.environ.get("GROUP_WORLD_SIZE", "1") == "1":
            store = dist.PrefixStore(f"attempt {restarts()}", store)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=TIMEOUT)
        return Processes(rank, count, dist.new_group(backend="gloo", timeout=TIMEOUT))
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise TrainingError(f"The processes could not find one another: {_first_line(error)}") from error


def _local_device(device: str) -> torch.device:
    """Each process of a machine has a GPU of its own, or all of them the CPU."""
    place = resolve_device(device)
    if place.type == "cuda":
        here, gpus = _number_of("LOCAL_WORLD_SIZE", 1), torch.cuda.device_count()
        if place.index is not None:
            raise ConfigError(f"Under torchrun each process takes a GPU of its own: use --device cuda, not {device}.")
        if here > gpus:
            raise TrainingError(
                f"torchrun started {here} processes on this machine, which has {gpus} GPUs. Each process needs its "
                f"own: use --nproc-per-node {gpus}."
            )
        return torch.device("cuda", _number_of("LOCAL_RANK"))
    if place.type != "cpu":
        raise ConfigError(f"Several processes can train on CUDA or on the CPU, not on {place}. Use --device cpu.")
    return place


class _SumOverProcesses(torch.autograd.Function):
    """A sum over all processes; as each of them uses it, its gradient is the sum of all their gradients."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return _all_reduce(x.clone(memory_format=torch.contiguous_format))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return _all_reduce(gradient.clone(memory_format=torch.contiguous_format))


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    with _lost_contact():
        dist.all_reduce(x)
    return x


@contextlib.contextmanager
def _lost_contact() -> Iterator[None]:
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise TrainingError(
            f"Lost contact with another process of this run: {_first_line(error)} The same command continues from "
            "the last checkpoint; `torchrun --max-restarts N` does so by itself."
        ) from error


def _first_line(error: Exception) -> str:
    """The first sentence of a library's message, without the place in its source where it comes from."""
    return re.sub(r"^\[\S*\]\s*", "", str(error).strip()).splitlines()[0].split(". ")[0].rstrip(".") + "."


class SharedBatchNorm(_BatchNorm):
    """BatchNorm over the batch of all processes, on any device; names and numbers of ``nn.BatchNorm1d`` and ``2d``."""

    def __init__(self, original: _BatchNorm, processes: Processes) -> None:
        super().__init__(original.num_features, original.eps, original.momentum)
        self.__dict__.update(
            {k: v for k, v in original.__dict__.items() if k in ("_parameters", "_buffers", "training")}
        )
        self._processes = processes

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Inputs are (N, C) or (N, C, ...)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(x)
        others, wide = [0, *range(2, x.ndim)], (1, -1, *[1] * (x.ndim - 2))
        values = x.float()
        mean_C = self._processes.mean(values.mean(others))
        # Two passes, as in the one-process kernel: a mean of squares minus a squared mean would lose digits.
        centred = values - mean_C.view(wide)
        variance_C = self._processes.mean(centred.square().mean(others))
        samples = x.numel() // x.shape[1] * self._processes.count
        self._update_running(mean_C.detach(), variance_C.detach(), samples)
        normalised = centred * (variance_C + self.eps).rsqrt().view(wide)
        return (normalised * self.weight.view(wide) + self.bias.view(wide)).to(x.dtype)

    @torch.no_grad()
    def _update_running(self, mean_C: torch.Tensor, variance_C: torch.Tensor, samples: int) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.running_mean.lerp_(mean_C, self.momentum)
        self.running_var.lerp_(variance_C * (samples / (samples - 1)), self.momentum)
        self.num_batches_tracked.add_(1)


def share_batchnorm(model: nn.Module, processes: Processes) -> None:
    """Replace each BatchNorm of ``model`` by one that sees the batch of all processes."""
    if processes.count == 1:
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) in (nn.BatchNorm1d, nn.BatchNorm2d):
                setattr(module, name, SharedBatchNorm(cast(_BatchNorm, child), processes))
