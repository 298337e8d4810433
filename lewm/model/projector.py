"""The projectors behind encoder and predictor, and BatchNorm's statistics measured for the weights as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class Projector(nn.Sequential):
    """MLP with BatchNorm (N, W) -> (N, D).

    The transformer in front ends in a LayerNorm, which pins every vector's norm; without this projection its
    outputs could never become Gaussian.
    """

    def __init__(self, width: int, hidden: int, embed_dim: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Linear(hidden, embed_dim))

    hidden = property(lambda self: self[0])
    norm = property(lambda self: self[1])
    out = property(lambda self: self[3])


def set_statistics(projector: Projector, inputs: Sequence[torch.Tensor]) -> None:
    """Mean and variance of what the projector's BatchNorm sees for inputs (N, W), all of them together."""
    variance, mean = torch.var_mean(torch.cat([projector.hidden(x).float() for x in inputs]), dim=0)
    projector.norm.running_mean.copy_(mean)
    projector.norm.running_var.copy_(variance)


@contextlib.contextmanager
def measuring(module: nn.Module) -> Iterator[None]:
    """Each BatchNorm inside normalises by its own batch, and in the end has the mean of all batches' statistics.

    For networks with many of them, whose inputs cannot be collected at once. They talk to no other process.
    """
    norms = [child for child in module.modules() if isinstance(child, _BatchNorm)]
    seen: dict[_BatchNorm, list[tuple[torch.Tensor, torch.Tensor]]] = {norm: [] for norm in norms}
    for norm in norms:
        norm.forward = partial(_by_its_batch, norm, seen[norm])  # type: ignore[method-assign]
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward
    for norm, statistics in seen.items():
        means, variances = (torch.stack(parts) for parts in zip(*statistics, strict=True))
        assert norm.running_mean is not None
        assert norm.running_var is not None
        norm.running_mean.copy_(means.mean(0))
        norm.running_var.copy_(variances.mean(0))


def _by_its_batch(norm: _BatchNorm, seen: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> torch.Tensor:
    """(N, C, ...) normalised by its own mean and variance, which are noted, (C,) each."""
    variance, mean = torch.var_mean(x.float(), dim=[0, *range(2, x.ndim)])
    seen.append((mean, variance))
    return F.batch_norm(x, None, None, norm.weight, norm.bias, training=True, eps=norm.eps)
