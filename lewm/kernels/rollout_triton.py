"""The planning rollout on Hopper GPUs: ``FastRollout``'s algorithm in Triton kernels.

The residual stream ``x`` has 192 columns, held as three tiles of 64 because Triton's tiles are powers of two. What is
constant is folded into weights (see ``rollout_weights``).

With few rows, time goes into starting kernels and waiting for weights, so there are two kernels per layer and nothing
wide reaches memory:

- attention normalises and modulates a tile of tokens, then for each head projects to q, k and v, attends and projects
  back: x + gate * attention(x). Keys and values are stored only where a later step reads them. In ``attend_token`` a
  single new token meets its few predecessors row by row. In ``attend_window`` several new tokens (neighbouring rows)
  are multiplied all with all of the tile, and a mask keeps the causal pairs of one candidate: wasteful on paper, but it
  runs on the tensor cores;
- ``transform_tokens`` does the same for each chunk of the hidden layer: x + gate * mlp(x). Without modulation it is the
  final norm and the prediction projector.

A few hundred rows make too few tiles to fill the chip. Then the heads, or hidden chunks, of a tile are divided among
groups of programs, which add their parts to the output atomically, so that its last bits vary from run to run. Such an
output has to start as zeros: three buffers rotate, and the kernel that reads one and adds to the second clears the
third for its successor. Kernels start before their predecessor has ended (programmatic dependent launch): a program
with a single head or chunk loads its weights first and only then waits for what the predecessor writes.

With many rows, attention is faster apart: ``normalise_tokens``, a library product for q, k and v, ``mix_tokens`` for
the attention proper and ``project_back`` for the way back, gate and residual.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lewm.kernels.common import HAS_TRITON, is_hopper
from lewm.kernels.network import Network, Sizes
from lewm.kernels.rollout_attention import attend
from lewm.kernels.rollout_attention_apart import attend_apart
from lewm.kernels.rollout_launch import HEAD, WIDTH, Buffers, Launch, Tokens
from lewm.kernels.rollout_mlp import modulate, project, transform
from lewm.kernels.rollout_tiling import Kernel, Tiling, choose_tiling
from lewm.kernels.rollout_weights import FoldedWeights, KernelWeights
from lewm.kernels.rollout_window import walk


def supports(model: Network) -> bool:
    """Whether the kernels fit this model and the GPU it is on; their tiles fill the shared memory of a Hopper."""
    sizes = Sizes.of(model)
    fits = (sizes.embedding, sizes.head_width) == (WIDTH, HEAD) and sizes.history <= 3
    return HAS_TRITON and is_hopper(model.device) and fits and sizes.mlp % 128 == sizes.projector % 128 == 0


@dataclass(frozen=True)
class _Sequence:
    """The tokens that all candidates share (its rows are environments), or the candidates' own.

    z: embeddings (rows, n, D), float32.  modulation: (rows, n, layers*6*D).  first: where the first of them stands in
    the rollout.  buffers: for ``rows * history`` tokens.
    """

    z: Tensor
    modulation: Tensor
    first: int
    buffers: Buffers


class TritonRollout:
    """Rolls out candidate plans with a frozen copy of a model's weights, on a GPU that ``supports`` accepts.

    Waits for nothing on the host and can be captured in a CUDA graph. Computes no gradients.

    Args:
        model: the model, in evaluation mode.
        dtype: of weights and products; sums, norms and the residual stream are float32.
        tiling: how kernels divide their work, given their name and number of rows.
        fused_rows: up to how many rows attention is one kernel.
    """

    def __init__(
        self,
        model: Network,
        dtype: torch.dtype = torch.bfloat16,
        tiling: Callable[[Kernel, int], Tiling] = choose_tiling,
        fused_rows: int = 4000,
    ) -> None:
        self.weights = KernelWeights.of(FoldedWeights.of(model), dtype)
        self._dtype, self._fused_rows = dtype, fused_rows
        # Triton's interpreter, in which the tests run on the CPU, knows no assembly.
        on_gpu = model.device.type == "cuda"
        self._launch = Launch(tiling, overlap=on_gpu, fast_gelu=on_gpu and dtype == torch.bfloat16)
        self._no_positions = torch.zeros_like(self.weights.positions)

    @torch.no_grad()
    def __call__(self, z_BTD: Tensor, past_BTA: Tensor, actions_BSHA: Tensor) -> Tensor:
        """Predictions (B, S, H, D) in float32; arguments as for the model's ``rollout``."""
        b, s, horizon, _ = actions_BSHA.shape
        context = z_BTD.shape[1]
        z_BSHD = z_BTD.new_zeros(b, s, horizon + 1, WIDTH, dtype=torch.float32)
        z_BSHD[:, :, 0] = z_BTD[:, -1:]
        shared = self._sequence(z_BTD.float().contiguous(), past_BTA.unsqueeze(1), 0)
        own = self._sequence(z_BSHD.flatten(0, 1), actions_BSHA, context - 1)
        window: list[list[Tensor]] = []  # of each layer, keys and values (rows, 2 * inner) of each known token
        for step in walk(context, horizon, self.weights.history):
            if step.begins:
                window = [[] for _ in self.weights.mlp]
            if step.shared:
                self._send(shared, step.shared, step.start, window, keeps=True, read_last=False)
            self._send(own, step.own, step.start, window, keeps=step.grows, read_last=True)
        return z_BSHD[:, :, 1:]

    def modulations(self, actions: Tensor) -> Tensor:
        """Action blocks (..., A) -> all layers' shifts, scales and gates (..., layers*6*D)."""
        return modulate(actions, self.weights, self._launch)

    def _sequence(self, z: Tensor, actions: Tensor, first: int) -> _Sequence:
        """Embeddings (rows, n, D) and their action blocks (B, S or 1, n, A), ready to be sent through the layers."""
        adds = any(self._launch.adds(len(z) * n) for n in range(1, self.weights.history + 1))
        buffers = Buffers(len(z) * self.weights.history, adds, like=z)
        return _Sequence(z, self.modulations(actions).flatten(0, 1), first, buffers)

    def _send(
        self, sequence: _Sequence, new: range, start: int, window: list[list[Tensor]], keeps: bool, read_last: bool
    ) -> None:
        """Send new tokens of the window from ``start`` through all layers, which remember them if it ``keeps`` them.

        With ``read_last``, what the last one predicts is written behind it into the sequence.
        """
        first, end = new.start - sequence.first, new.stop - sequence.first
        x, positions = sequence.z[:, first:], self.weights.positions[new.start - start :]
        modulation = sequence.modulation[:, first:end].unflatten(2, (-1, 6 * WIDTH)).unbind(2)
        fused = len(x) * len(new) <= self._fused_rows
        memory = self._allocate(x, len(new), keeps, fused)
        outputs = [len(new)] * (len(memory) - 1) + [int(read_last)]
        layers = zip(self.weights.attention, self.weights.mlp, modulation, window, memory, outputs, strict=True)
        for attention, mlp, mod, past, kv, count in layers:
            tokens = Tokens(x, positions, mod, past)
            x = (attend if fused else attend_apart)(tokens, attention, kv, count, sequence.buffers, self._launch)
            if keeps:
                past += kv[..., -2 * len(attention.out.weight) :].unbind(1)
            if count > 0:
                mod = mod[:, -count:, 3 * WIDTH :]  # the MLP's shift, scale and gate come after the attention's
                x = transform(x, mod, mlp, sequence.buffers, self._launch)
            positions = self._no_positions
        if read_last:
            project(x, self.weights.projector, sequence.z[:, end], self._launch)

    def _allocate(self, x: Tensor, count: int, keeps: bool, fused: bool) -> list[Tensor]:
        """For each layer, memory for the keys and values (rows, n, 2 * inner) of ``count`` tokens of x (rows, _, D).

        Apart, attention has queries in front of them. What is not kept needs no memory in one kernel; apart, layers can
        share it.
        """
        layers, inner = len(self.weights.attention), len(self.weights.attention[0].out.weight)
        width = 3 * inner if not fused else 2 * inner if keeps else 0
        memory = x.new_empty(layers if keeps else 1, len(x), count, width, dtype=self._dtype)
        return list(memory.expand(layers, -1, -1, -1))
