"""What the Triton kernels of the planning rollout are given: how they start, what they read and where they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from lewm.kernels.rollout_tiling import Kernel, Tiling

WIDTH = 192  # of an embedding, which the kernels are written for
HEAD = 64  # width of a head


@dataclass(frozen=True)
class Launch:
    """How kernels are started.

    tiling: how they divide their work, given their name and number of rows.  overlap: whether they start before their
    predecessor has ended.  fast_gelu: within 1e-3, which bfloat16 does not show. Only a GPU can do the latter two.
    """

    tiling: Callable[[Kernel, int], Tiling]
    overlap: bool
    fast_gelu: bool

    def options(self, tiling: Tiling) -> dict[str, Any]:
        """The arguments that all kernels have."""
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": self.overlap}
        return {"ROWS": tiling.rows, "OVERLAP": self.overlap} | options

    def adds(self, rows: int) -> bool:
        """Whether some kernel divides so many rows among programs that add to the same output."""
        kernels: tuple[Kernel, ...] = ("attention", "attention_past", "mlp")
        return any(self.tiling(kernel, rows).groups > 1 for kernel in kernels)


class Strided(NamedTuple):
    """Where something begins for each candidate, for kernels. stride: in numbers, from one candidate to the next.

    Strides are multiples of 16. That spares the compiler from taking each of their values for a new kind of kernel.
    """

    start: Tensor
    stride: int


class Spare(NamedTuple):
    """A buffer that a kernel clears for its successor. size: in numbers, a multiple of 16."""

    start: Tensor
    size: int


class New(NamedTuple):
    """New tokens of each candidate, for kernels: neighbours in memory.  positions: (n, D), to be added to x."""

    x: Strided
    mod: Strided
    positions: Tensor


@dataclass(frozen=True)
class Tokens:
    """New tokens in front of a layer: n neighbouring ones for each candidate, of which there are ``rows``.

    x: (rows, n or more, D).  positions: (n or more, D), to be added.  mod: the layer's modulation (rows, n, 6*D).
    past: keys and values (rows, 2 * inner) of each earlier token. Those that candidates share come first and have fewer
    rows.
    """

    x: Tensor
    positions: Tensor
    mod: Tensor
    past: Sequence[Tensor]

    @property
    def count(self) -> int:
        """n."""
        return self.mod.shape[1]

    def last(self, outputs: int) -> Tokens:
        """The last so many of them."""
        first = self.count - outputs
        return Tokens(self.x[:, first:], self.positions[first:], self.mod[:, first:], self.past)

    def new(self) -> New:
        """The tokens as kernels take them."""
        return New(Strided(self.x, self.x.stride(0)), Strided(self.mod, self.mod.stride(0)), self.positions)

    def earlier(self) -> tuple[tuple[Strided, ...], int, int]:
        """past, samples and shared as kernels take them: the first ``shared`` each serve ``samples`` candidates."""
        shared = [tokens for tokens in self.past if len(tokens) < len(self.x)]
        samples = len(self.x) // len(shared[0]) if shared else 1
        return tuple(Strided(tokens, tokens.stride(0)) for tokens in self.past), samples, len(shared)


class Buffers:
    """Three buffers for tokens (rows, D): a kernel reads one, writes to the second and clears the third.

    Args:
        rows: of a buffer, at most.
        cleared: whether some kernel adds to its output, which has to start as zeros.
        like: a tensor of the device and type.
    """

    def __init__(self, rows: int, cleared: bool, like: Tensor) -> None:
        allocate = like.new_zeros if cleared else like.new_empty
        self._buffers = list(allocate(3, rows, WIDTH))
        self._cleared = cleared

    def rotate(self) -> tuple[Tensor, Spare | None]:
        """The buffer to write to and the one to clear, if there is any."""
        self._buffers.append(self._buffers.pop(0))
        target, spare, _ = self._buffers
        return target, Spare(spare, spare.numel()) if self._cleared else None
