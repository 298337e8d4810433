"""The planning rollout of some hundred candidates as one CUDA kernel, ``rollout_cluster.cu``.

With one or a few environments, the kernels of ``rollout_triton`` spend their time on starting, on waiting for weights
and on adding up parts through the memory that all of the chip shares: a step of the rollout is 13 kernels that wait for
one another. Here a group of eight thread blocks, which can read each other's shared memory (a cluster, new in Hopper),
takes some twenty candidates through the whole rollout by itself. It never waits for the rest of the chip, while the
next weights are always on their way. Sums are added in a fixed order: the same input gives the same bits.

Every cluster reads all weights at every step. For many environments that is too much; ``rollout_triton`` takes over.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from lewm.kernels.network import Network, Sizes
from lewm.kernels.nvrtc import CudaKernel
from lewm.kernels.rollout_launch import HEAD, WIDTH
from lewm.kernels.rollout_triton import TritonRollout
from lewm.kernels.rollout_triton import supports as triton_supports
from lewm.kernels.rollout_weights import KernelWeights, MLPWeights

# As in the source of the kernel.
BLOCKS, WARPS, HISTORY, LAYERS = 8, 8, 3, 6
INNER, HIDDEN = 128, 256  # of one block
SHARED_BYTES = 227 * 1024

MOST_PER_CLUSTER = 21  # candidates; a window of tokens for each has to fit into 64 rows
MOST_WAVES = 3  # of as many clusters as run at once; beyond, many kernels that read each weight once are faster


class _Arguments(ctypes.Structure):
    """``Arguments`` of the kernel."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("context", "shared_mod", "own_mod", "positions")],
        *[(name, ctypes.c_void_p) for name in ("weights", "biases", "kept", "out")],
        *[(name, ctypes.c_int) for name in ("candidates", "per_cluster", "samples", "frames", "horizon")],
    )


def supports(model: Network) -> bool:
    """Whether the kernel fits this model and the GPU it is on."""
    fits = Sizes(HISTORY, WIDTH, LAYERS, BLOCKS * INNER // HEAD, HEAD, BLOCKS * HIDDEN, BLOCKS * HIDDEN)
    return triton_supports(model) and Sizes.of(model) == fits


class ClusterRollout:
    """Rolls out candidate plans with a frozen copy of a model's weights in bf16, on a GPU that ``supports`` accepts.

    Waits for nothing on the host and can be captured in a CUDA graph. Computes no gradients.
    """

    def __init__(self, model: Network) -> None:
        self._for_many = TritonRollout(model, torch.bfloat16)
        self._kernel = CudaKernel(Path(__file__).with_suffix(".cu"), "rollout", 32 * WARPS, SHARED_BYTES)
        # Perhaps 15 on an H200: of its 132 multiprocessors, clusters can only use those that come in groups of 8.
        self._at_once = self._kernel.clusters_at_once(BLOCKS)
        weights = self._for_many.weights
        self._positions = weights.positions.contiguous()
        self._weights = torch.stack([_weights_of_block(weights, rank) for rank in range(BLOCKS)])
        self._biases = torch.stack([_biases_of_block(weights, rank) for rank in range(BLOCKS)])

    @torch.no_grad()
    def __call__(self, z_BTD: Tensor, past_BTA: Tensor, actions_BSHA: Tensor) -> Tensor:
        """Predictions (B, S, H, D) in float32; arguments as for the model's ``rollout``."""
        b, s, horizon, _ = actions_BSHA.shape
        waves = math.ceil(b * s / (self._at_once * MOST_PER_CLUSTER))
        if waves > MOST_WAVES:
            return self._for_many(z_BTD, past_BTA, actions_BSHA)
        per_cluster = math.ceil(b * s / (self._at_once * waves))
        clusters = math.ceil(b * s / per_cluster)
        out_BSHD = z_BTD.new_empty(b, s, horizon, WIDTH, dtype=torch.float32)
        # All are kept alive by their names until the kernel is queued; the allocator knows the order of what follows.
        context, positions = z_BTD.float().contiguous(), self._positions
        shared_mod, own_mod = self._for_many.modulations(past_BTA), self._for_many.modulations(actions_BSHA)
        kept = own_mod.new_empty(clusters, BLOCKS, LAYERS, HISTORY - 1, per_cluster, 2 * INNER)
        tensors = (context, shared_mod, own_mod, positions, self._weights, self._biases, kept, out_BSHD)
        pointers = [tensor.data_ptr() for tensor in tensors]
        self._kernel.launch(clusters * BLOCKS, _Arguments(*pointers, b * s, per_cluster, s, z_BTD.shape[1], horizon))
        return out_BSHD


def _weights_of_block(weights: KernelWeights, rank: int) -> Tensor:
    """One block's share of all weights, in the order in which it needs them, bf16 (n,)."""
    heads = slice(rank * INNER, (rank + 1) * INNER)
    parts = []
    for attention, mlp in zip(weights.attention, weights.mlp, strict=True):
        qkv = attention.qkv.weight.unflatten(1, (3, -1))[:, :, heads].flatten(1)
        parts += [qkv, attention.out.weight[heads], *_mlp_share(mlp, rank)]
    return torch.cat([as_fragments(part) for part in [*parts, *_mlp_share(weights.projector, rank)]])


def _biases_of_block(weights: KernelWeights, rank: int) -> Tensor:
    """One block's biases, float32 (BIASES,); of those behind a sum over blocks each has a copy."""
    heads, hidden = slice(rank * INNER, (rank + 1) * INNER), slice(rank * HIDDEN, (rank + 1) * HIDDEN)
    parts = []
    for attention, mlp in zip(weights.attention, weights.mlp, strict=True):
        parts += [attention.qkv.bias[heads], attention.out.bias, mlp.hidden.bias[hidden], mlp.out.bias]
    return torch.cat([*parts, weights.projector.hidden.bias[hidden], weights.projector.out.bias])


def _mlp_share(mlp: MLPWeights, rank: int) -> tuple[Tensor, Tensor]:
    """One block's columns of the first layer and rows of the second."""
    hidden = slice(rank * HIDDEN, (rank + 1) * HIDDEN)
    return mlp.hidden.weight[:, hidden], mlp.out.weight[hidden]


def as_fragments(weight: Tensor) -> Tensor:
    """A weight (K, N) in the order in which tensor cores take it, (K*N,).

    Slices of 16 rows; in each, the columns of one warp after the other; of these, pairs of 8 columns, then perhaps a
    single 8. Lane 4g + t of a warp holds rows 2t, 2t+1, 2t+8, 2t+9 of column g: 16 bytes of a pair, 8 of a single one.
    """
    rows, columns = weight.shape
    tiles = columns // (8 * WARPS)
    parts = weight.reshape(rows // 16, 2, 4, 2, WARPS, tiles, 8)  # slice, half, t, odd, warp, tile, g
    lanes = parts.permute(0, 4, 5, 6, 2, 1, 3).reshape(rows // 16, WARPS, tiles, 32, 4)
    paired = lanes[:, :, : tiles // 2 * 2].unflatten(2, (-1, 2)).transpose(3, 4)
    single = lanes[:, :, tiles // 2 * 2 :]
    return torch.cat([paired.flatten(2), single.flatten(2)], dim=2).flatten().contiguous()
