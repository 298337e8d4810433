"""The planning rollout on Hopper GPUs: ``FastRollout``'s algorithm in Triton kernels.

The residual stream ``x`` has 192 columns, held as three tiles of 64 because Triton's tiles are powers of two. The
affine parts of the norms, the attention's scale and BatchNorm are folded into the weights that follow them. Of the
biases this leaves in front of attention, the keys' changes no softmax and the values' goes through into the output's.

With few rows, time goes into starting kernels and waiting for weights, so there are two kernels per layer and nothing
wide reaches memory:

- ``attention_kernel`` normalises and modulates a tile of tokens, then for each head projects to q, k and v, attends
  and projects back: x + gate * attention(x). Keys and values are stored only where a later step reads them. A single
  new token meets its few predecessors row by row; several new tokens (neighbouring rows) are multiplied all with all
  of the tile, and a mask keeps the causal pairs of one candidate: wasteful on paper, but it runs on the tensor cores;
- ``mlp_kernel`` does the same for each chunk of the hidden layer: x + gate * mlp(x). Without AdaLN it is the final
  norm and the prediction projector.

A few hundred rows make too few tiles to fill the chip. Then the heads, or hidden chunks, of a tile are divided among
``groups`` programs, which add their parts to the output atomically, so that its last bits vary from run to run. Such an
output has to start as zeros: three buffers rotate, and the kernel that reads one and adds to the second clears the
third for its successor. Kernels start before their predecessor has ended (programmatic dependent launch): a program
with a single head or chunk loads its weights first and only then waits for what the predecessor writes.

With many rows, attention is faster apart: ``norm_kernel``, a library product for q, k and v, ``mix_kernel`` for the
attention proper and ``output_kernel`` for the projection back, gate and residual.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lewm.model.kernels import is_hopper
from lewm.model.rollout import FastRollout, _fold_batch_norm
from lewm.model.rollout_kernels import (
    HEAD,
    WIDTH,
    attention_kernel,
    embed_kernel,
    mix_kernel,
    mlp_kernel,
    norm_kernel,
    output_kernel,
    triton,
)

if TYPE_CHECKING:
    from lewm.model.jepa import JEPA


@dataclass(frozen=True)
class Tiling:
    """How a kernel divides its work.

    rows: tokens per program.  groups: programs that share the heads or hidden chunks of a tile.  warps, stages: per
    program, as in Triton.  chunk: hidden units that an MLP program handles at a time.
    """

    rows: int
    groups: int
    warps: int = 4
    stages: int = 2
    chunk: int = 64


Kernel = Literal["attention", "attention_past", "mlp", "output"]
# The largest number of rows that each tiling is for; the fastest of a sweep on an H200.
_TILINGS: dict[Kernel, list[tuple[float, Tiling]]] = {
    "attention": [(600, Tiling(32, 16)), (1500, Tiling(32, 4)), (4000, Tiling(32, 2)), (math.inf, Tiling(32, 1))],
    "attention_past": [(1500, Tiling(32, 16)), (math.inf, Tiling(32, 1))],
    "mlp": [
        (600, Tiling(32, 16, chunk=128)),
        (1500, Tiling(64, 8)),
        (6000, Tiling(64, 2)),
        (math.inf, Tiling(128, 1, warps=8, stages=3)),
    ],
    "output": [(math.inf, Tiling(64, 1, stages=3))],
}


def choose_tiling(kernel: Kernel, rows: int) -> Tiling:
    """The tiling for a number of rows; ``attention_past`` is attention that sees earlier tokens."""
    return next(tiling for most, tiling in _TILINGS[kernel] if rows <= most)


def supports(model: JEPA) -> bool:
    """Whether the kernels fit this model and the GPU it is on; their tiles fill the shared memory of a Hopper."""
    config = model.settings
    return (
        triton is not None
        and is_hopper(model.device)
        and (config.embed_dim, config.predictor.head_width) == (WIDTH, HEAD)
        and config.history <= 3
        and config.predictor.mlp_width % 128 == config.projector_width % 128 == 0
    )


class _Linear:
    """A linear layer as ``x @ weight + bias``, the affine part of the norm in front folded in; the bias is float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, norm: nn.LayerNorm | None, dtype: torch.dtype) -> None:
        weight = weight.detach().float()
        bias = weight.new_zeros(weight.shape[0]) if bias is None else bias.detach().float()
        if norm is not None:
            weight, bias = weight * norm.weight, bias + weight @ norm.bias
        self.weight, self.bias = weight.T.contiguous().to(dtype), bias.contiguous()


class _Block:
    """The weights of one ``AdaLNBlock`` as the kernels want them."""

    def __init__(self, block: Any, dtype: torch.dtype) -> None:
        attention, (norm, hidden, _, _, out, _) = block.attention, block.mlp
        # Scores are divided by the square root of the head's width; the kernel's exponentials are powers of two.
        scale = torch.ones_like(attention.qkv.weight[:, :1])
        self.inner = len(scale) // 3
        scale[: self.inner] = HEAD**-0.5 * math.log2(math.e)
        self.heads = attention.heads
        self.qkv = _Linear(attention.qkv.weight * scale, None, attention.norm, dtype)
        # The weights of a softmax sum to one, so that the values' bias comes out of attention unchanged.
        out_bias = attention.out.bias + attention.out.weight @ self.qkv.bias[2 * self.inner :]
        self.out = _Linear(attention.out.weight, out_bias, None, dtype)
        self.mlp = (_Linear(hidden.weight, hidden.bias, norm, dtype), _Linear(out.weight, out.bias, None, dtype))


@dataclass
class _Tokens:
    """The tokens that all candidates share (its rows are environments), or the candidates' own.

    z: embeddings (rows, n, D), float32.  modulation: of each of the n (rows, layers*6*D).  first: where the first of
    them stands in the rollout.  buffers: three (rows * history, D) that rotate.  split: some kernel adds to its output.
    """

    z: Tensor
    modulation: list[Tensor]
    first: int
    buffers: list[Tensor]
    split: bool

    def rotate(self) -> tuple[Tensor, Tensor]:
        """The buffer to write to and the one to clear."""
        self.buffers.append(self.buffers.pop(0))
        return self.buffers[0], self.buffers[1]


class TritonRollout(FastRollout):
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
        model: JEPA,
        dtype: torch.dtype = torch.bfloat16,
        tiling: Callable[[Kernel, int], Tiling] = choose_tiling,
        fused_rows: int = 4000,
    ) -> None:
        super().__init__(model, dtype)
        self._tiling, self._fused_rows = tiling, fused_rows
        # Triton's interpreter, in which the tests run on the CPU, knows no assembly.
        self._overlap = model.device.type == "cuda"
        self._fast_gelu = self._overlap and dtype == torch.bfloat16
        with torch.no_grad():
            self._blocks = [_Block(block, dtype) for block in model.predictor.blocks]
            hidden, out = _fold_batch_norm(model.prediction_projector, torch.float32)
            self._projector = (_Linear(*hidden, model.predictor.norm, dtype), _Linear(*out, None, dtype))
            self._first_positions = model.predictor.positions[0].detach().float().contiguous()
            # Nothing comes between the embedder's first two layers, so they are one.
            embedder = model.action_embedder
            reduce, first, second = cast("list[nn.Linear]", [embedder.reduce, embedder.mlp[0], embedder.mlp[2]])
            bias = first.bias + first.weight @ reduce.bias
            self._embedder = (
                _Linear(first.weight @ reduce.weight, bias, None, dtype),
                _Linear(second.weight, second.bias, None, dtype),
            )
        self._no_positions = torch.zeros_like(self._first_positions)
        self._mod_width = len(self._blocks) * 6 * WIDTH

    @torch.no_grad()
    def __call__(self, z_BTD: Tensor, past_BTA: Tensor, actions_BSHA: Tensor) -> Tensor:
        """Predictions (B, S, H, D) in float32; arguments as for ``JEPA.rollout``."""
        b, s, horizon, _ = actions_BSHA.shape
        context = z_BTD.shape[1]
        z_BSHD = z_BTD.new_zeros(b, s, horizon + 1, WIDTH, dtype=torch.float32)
        z_BSHD[:, :, 0] = z_BTD[:, -1:]
        shared = self._tokens(z_BTD.float().contiguous(), past_BTA.unsqueeze(1), 0)
        own = self._tokens(z_BSHD.flatten(0, 1), actions_BSHA, context - 1)
        window_start, fresh = 0, 0
        past: list[Tensor] = []
        for end in range(context, context + horizon):
            start = max(0, end - self.history)
            if start != window_start:
                window_start, fresh, past = start, start, []
            shared_end = min(end, context - 1)
            if fresh < shared_end:
                past = past + self._send(shared, past, start, fresh, shared_end, keep=True, read_last=False)
            keep = end - start < self.history
            past = past + self._send(own, past, start, max(fresh, shared_end), end, keep, read_last=True)
            fresh = end
        return z_BSHD[:, :, 1:]

    def _modulate(self, actions: Tensor) -> Tensor:
        """Action blocks (..., A) -> all layers' shifts, scales and gates (..., layers*6*D)."""
        hidden, out = self._embedder
        rows, tiling = (
            actions.shape[:-1].numel(),
            Tiling(16, 1, warps=8, stages=3) if actions.numel() < 50_000 else Tiling(64, 1),
        )
        embedded = actions.new_empty(*actions.shape[:-1], WIDTH, dtype=self.dtype)
        if rows:
            embed_kernel[(triton.cdiv(rows, tiling.rows),)](
                actions.contiguous(), hidden.weight, hidden.bias, out.weight, out.bias, embedded, rows,
                ACTION=actions.shape[-1], HIDDEN=hidden.weight.shape[1],
                PADDED=max(16, triton.next_power_of_2(actions.shape[-1])), **self._launch_options(tiling),
            )  # fmt: skip
        return F.linear(embedded, *self._modulation)

    def _tokens(self, z: Tensor, actions: Tensor, first: int) -> _Tokens:
        """Embeddings (rows, n, D) and their action blocks (B, S or 1, n, A), ready to be sent through the layers."""
        kernels: tuple[Kernel, ...] = ("attention", "attention_past", "mlp")
        rows = [len(z) * n for n in range(1, self.history + 1)]
        split = any(self._tiling(kernel, count).groups > 1 for kernel in kernels for count in rows)
        allocate = z.new_zeros if split else z.new_empty
        modulation = [m.flatten(0, 1) for m in self._modulate(actions).unbind(2)]
        return _Tokens(z, modulation, first, list(allocate(3, rows[-1], WIDTH)), split)

    def _send(
        self, tokens: _Tokens, past: list[Tensor], start: int, first: int, end: int, keep: bool, read_last: bool
    ) -> list[Tensor]:
        """Send tokens first..end-1 of the window from ``start`` through all layers; with ``read_last``, write the next.

        ``past``: keys and values (layers, rows, 2 * inner) of each earlier token. Returns these tokens', if ``keep``.
        """
        first, end = first - tokens.first, end - tokens.first
        x, positions = tokens.z[:, first:], self._first_positions[first + tokens.first - start :]
        layers, inner, rows = len(self._blocks), self._blocks[0].inner, len(x)
        fused = rows * (end - first) <= self._fused_rows
        attend = self._attend if fused else self._attend_apart
        # In one kernel, only what is kept needs memory; apart, q, k and v do, but those not kept can share it.
        shape = (layers, rows, end - first, 2 * inner if keep else 0)
        if not fused:
            shape = (layers if keep else 1, rows, end - first, 3 * inner)
        kept = x.new_empty(shape, dtype=self.dtype)
        for depth, block in enumerate(self._blocks):
            outputs = end - first if block is not self._blocks[-1] else int(read_last)
            mod = [m[:, depth * 6 * WIDTH :] for m in tokens.modulation]
            memory = kept[min(depth, len(kept) - 1)]
            x = attend(tokens, x, positions, mod[first:end], block, [p[depth] for p in past], memory, outputs)
            if outputs > 0:
                x = self._transform(tokens, x, mod[end - outputs][:, 3 * WIDTH :], block.mlp, None)
            positions = self._no_positions
        if read_last:
            self._transform(tokens, x, None, self._projector, tokens.z[:, end])
        return list(kept[..., -2 * inner :].unbind(2)) if keep else []

    def _launch_options(self, tiling: Tiling) -> dict[str, int | bool]:
        """The arguments that all kernels have."""
        options = {"num_warps": tiling.warps, "num_stages": tiling.stages, "launch_pdl": self._overlap}
        return {"ROWS": tiling.rows, "OVERLAP": self._overlap} | options

    @staticmethod
    def _earlier(past: list[Tensor], rows: int, unused: Tensor) -> list[Any]:
        """The kernels' arguments for two earlier tokens (rows or fewer, 2 * inner); missing ones are never read."""
        known = [(p, p.stride(0), rows // len(p)) for p in past]
        return [argument for token in (known + [(unused, 1, 1)] * 2)[:2] for argument in token]

    def _attend(
        self, tokens: _Tokens, x: Tensor, positions: Tensor, mod: list[Tensor], block: _Block, past: list[Tensor],
        kv: Tensor, outputs: int,
    ) -> Tensor:  # fmt: skip
        """Tokens (rows, n, D) -> the last ``outputs`` of them; fills ``kv`` (rows, n, 2 * inner) unless it is empty."""
        rows, count = len(x), kv.shape[1]
        tiling = self._tiling("attention_past" if past else "attention", rows * count)
        groups = math.gcd(tiling.groups, block.heads)
        out, spare = tokens.rotate() if outputs > 0 else (x, x)
        attention_kernel[triton.cdiv(rows, tiling.rows // count), groups](
            x, x.stride(0) // WIDTH, positions, mod[0], mod[0].stride(0) // self._mod_width,
            block.qkv.weight, block.qkv.bias, block.out.weight, block.out.bias, kv, *self._earlier(past, rows, kv),
            out, spare, spare.numel(), rows,
            HEADS=block.heads // groups, INNER=block.inner, MOD_WIDTH=self._mod_width, NEW=count, PAST=len(past),
            OUTPUTS=outputs, KEEP=kv.numel() > 0, SPLIT=groups > 1, CLEAR=tokens.split and outputs > 0,
            **self._launch_options(tiling),
        )  # fmt: skip
        return out[: rows * outputs].view(rows, outputs, WIDTH) if outputs > 0 else x

    def _attend_apart(
        self, tokens: _Tokens, x: Tensor, positions: Tensor, mod: list[Tensor], block: _Block, past: list[Tensor],
        qkv: Tensor, outputs: int,
    ) -> Tensor:  # fmt: skip
        """Like ``_attend``, in several kernels; fills ``qkv`` (rows, n, 3 * inner)."""
        count, rows = qkv.shape[1], len(x) * outputs
        self._project_qkv(x, positions, mod[0], block, qkv, outputs, sees_others=count + len(past) > 1)
        if outputs == 0:
            return x
        out, spare = tokens.rotate()
        mixed = self._mix(block, past, qkv, outputs)
        tiling = self._tiling("output", rows)
        output_kernel[triton.cdiv(rows, tiling.rows), 1](
            mixed, mixed.stride(0), x[:, count - outputs :], x.stride(0) // WIDTH, positions[count - outputs :],
            mod[count - outputs], mod[0].stride(0) // self._mod_width, block.out.weight, block.out.bias,
            out, spare, spare.numel(), rows,
            HEADS=block.heads, MOD_WIDTH=self._mod_width, OUTPUTS=outputs, CLEAR=tokens.split,
            **self._launch_options(tiling),
        )  # fmt: skip
        return out[:rows].view(len(x), outputs, WIDTH)

    def _project_qkv(
        self, x: Tensor, positions: Tensor, mod: Tensor, block: _Block, qkv: Tensor, outputs: int, sees_others: bool
    ) -> None:
        """Fill qkv (rows, n, 3 * inner) from x (rows, n or more, D), with q only where it is read."""
        rows, count, _ = qkv.shape
        normed = x.new_empty(rows, count, WIDTH, dtype=self.dtype)
        norm_kernel[(triton.cdiv(rows * count, 16),)](
            x, x.stride(0) // WIDTH, positions, mod, mod.stride(0) // self._mod_width, normed, rows * count,
            NEW=count, MOD_WIDTH=self._mod_width, **self._launch_options(Tiling(16, 1)),
        )  # fmt: skip
        inner, weight = block.inner, block.qkv.weight
        if outputs == count and sees_others:
            torch.mm(normed.flatten(0, 1), weight, out=qkv.flatten(0, 1))
        else:
            torch.mm(normed.flatten(0, 1), weight[:, inner:], out=qkv.flatten(0, 1)[:, inner:])
        if 0 < outputs < count:
            torch.mm(normed[:, -1], weight[:, :inner], out=qkv[:, -1, :inner])

    def _mix(self, block: _Block, past: list[Tensor], qkv: Tensor, outputs: int) -> Tensor:
        """Attention of the last ``outputs`` tokens of qkv (rows, n, 3 * inner) -> (rows * outputs, inner)."""
        rows, count, _ = qkv.shape
        if count + len(past) == 1:
            return qkv[:, 0, 2 * block.inner :]
        mixed = qkv.new_empty(rows * outputs, block.inner)
        mix_kernel[(triton.cdiv(rows * block.heads, 16),)](
            qkv, block.qkv.bias, *self._earlier(past, rows, qkv), mixed, rows, HEADS=block.heads, INNER=block.inner,
            NEW=count, PAST=len(past), OUTPUTS=outputs, **self._launch_options(Tiling(16, 1)),
        )  # fmt: skip
        return mixed

    def _transform(
        self, tokens: _Tokens, x: Tensor, mod: Tensor | None, mlp: tuple[_Linear, _Linear], out: Tensor | None
    ) -> Tensor:
        """Tokens (rows, n, D) -> the same, updated; or, into ``out`` (rows, D), what the projector makes of them."""
        rows = x.shape[0] * x.shape[1]
        hidden, output = mlp
        tiling = self._tiling("mlp", rows)
        chunks = hidden.weight.shape[1] // tiling.chunk
        groups = math.gcd(tiling.groups, chunks)
        target, spare = tokens.rotate() if out is None else (out, x)
        mlp_kernel[triton.cdiv(rows, tiling.rows), groups](
            x, x.shape[1], x if mod is None else mod, 0 if mod is None else mod.stride(0) // self._mod_width,
            hidden.weight, hidden.bias, output.weight, output.bias, target, target.stride(0) // WIDTH,
            spare, spare.numel(), rows,
            CHUNKS=chunks // groups, HIDDEN=hidden.weight.shape[1], MOD_WIDTH=self._mod_width, ADALN=mod is not None,
            FAST=self._fast_gelu, SPLIT=groups > 1, CLEAR=tokens.split and out is None, CHUNK=tiling.chunk,
            **self._launch_options(tiling),
        )  # fmt: skip
        return target[:rows].view_as(x) if out is None else out
