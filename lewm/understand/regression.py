"""Two ways to read numbers from embeddings: ridge regression in closed form, and small MLPs side by side.

Everything is z-scored with what the training part says: inputs, so that no method's scale matters, and targets.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from lewm.rng import derive_seed
from lewm.types import Array

CONSTANT = 1e-9  # of its size: what varies less than that does not vary
CHUNK = 4096  # inputs of one frame that are looked at together where they are many
_WEIGHTS, _ORDER = 1, 2  # what random numbers of an MLP are for


@dataclass(frozen=True)
class Scale:
    """Means and standard deviations, (k,) each, and which numbers vary at all, bool (k,)."""

    mean: Array
    std: Array
    varies: Array

    @classmethod
    def of(cls, values: Array) -> Scale:
        """Those of numbers (n, k)."""
        mean, std = values.mean(axis=0, dtype=np.float64), values.std(axis=0, dtype=np.float64)
        varies = std > CONSTANT * np.maximum(1.0, np.abs(mean))
        return cls(mean, np.where(varies, std, 1.0), varies)

    def to(self, values: Array) -> Array:
        """Numbers (n, k), z-scored; those that do not vary become 0."""
        return np.where(self.varies, (values - self.mean) / self.std, 0.0)

    def back(self, values: Array) -> Array:
        return values * self.std + self.mean


# -- linear ----------------------------------------------------------------------------------------------------------


def fit_ridge(x_ND: Array, y_NK: Array, penalty: float) -> Callable[[Array], Array]:
    """The linear map that minimises |xw - y|² + penalty |w|² over z-scored inputs (N, D) and targets (N, K).

    Returns the function from z-scored inputs (n, D) to predictions (n, K). All arithmetic is in float64. Where inputs
    have more numbers than there are frames, the same solution comes from the frames' inner products.
    """
    frames, size = x_ND.shape
    if size <= frames:
        x, y = torch.from_numpy(x_ND).double(), torch.from_numpy(y_NK)
        inner = x.T @ x + penalty * torch.eye(size, dtype=torch.float64)
        w_DK = torch.linalg.solve(inner, x.T @ y)
        return lambda new_nD: (torch.from_numpy(new_nD).double() @ w_DK).numpy()
    inner = _inner(x_ND, x_ND) + penalty * torch.eye(frames, dtype=torch.float64)
    shares_NK = torch.linalg.solve(inner, torch.from_numpy(y_NK))
    return lambda new_nD: (_inner(new_nD, x_ND) @ shares_NK).numpy()


def _inner(a_nD: Array, b_mD: Array) -> torch.Tensor:
    """Inner products (n, m) in float64, without copies of all inputs in float64."""
    total = torch.zeros(len(a_nD), len(b_mD), dtype=torch.float64)
    for start in range(0, a_nD.shape[1], CHUNK):
        a, b = (torch.from_numpy(part[:, start : start + CHUNK]).double() for part in (a_nD, b_mD))
        total += a @ b.T
    return total


# -- MLPs ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MlpSettings:
    """Of all MLPs. width: of both hidden layers.  patience: epochs without a better validation that end one."""

    width: int = 256
    lr: float = 1e-3
    weight_decay: float = 1e-4
    batch: int = 512
    epochs: int = 50
    patience: int = 8


class SeparateMlps(nn.Module):
    """P independent MLPs with two hidden layers, computed together: they share their inputs and no weight."""

    def __init__(self, count: int, inputs: int, width: int, outputs: int, generator: torch.Generator) -> None:
        super().__init__()
        sizes = ((inputs, width), (width, width), (width, outputs))

        def drawn(*shape: int, fan_in: int) -> nn.Parameter:  # as nn.Linear draws them
            return nn.Parameter((2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(fan_in))

        self.weights = nn.ParameterList(drawn(count, a, b, fan_in=a) for a, b in sizes)
        self.biases = nn.ParameterList(drawn(count, 1, b, fan_in=a) for a, b in sizes)

    def forward(self, x_ND: torch.Tensor) -> torch.Tensor:
        """Inputs (N, D) -> outputs (P, N, K)."""
        first, *rest = self.weights
        count, inputs, width = first.shape
        # All first layers see the same inputs: one product is faster than P of them.
        flat = x_ND @ first.permute(1, 0, 2).reshape(inputs, count * width)
        hidden = flat.unflatten(-1, (count, width)).transpose(0, 1) + self.biases[0]
        for weight, bias in zip(rest, list(self.biases)[1:], strict=True):
            hidden = torch.baddbmm(bias, F.gelu(hidden), weight)
        return hidden


def fit_mlps(
    x_ND: Array,
    targets: Sequence[Array],
    validation_x: Array,
    validation_targets: Sequence[Array],
    settings: MlpSettings,
    seed: tuple[int, ...],
    device: torch.device,
    on_epoch: Callable[[int], None] | None = None,
) -> Callable[[Array], list[Array]]:
    """One MLP for each of P targets (N, K_p), all z-scored, each with its own early end; seed: of all random numbers.

    Returns the function from z-scored inputs (n, D) to the predictions of each target, (n, K_p). What one MLP learns
    does not depend on which others are trained beside it, but for its first weights and rounding.
    """
    sizes = [target.shape[1] for target in targets]
    generator = torch.Generator().manual_seed(derive_seed(*seed, _WEIGHTS))
    mlps = SeparateMlps(len(targets), x_ND.shape[1], settings.width, max(sizes), generator).to(device)
    optimizer = torch.optim.AdamW(mlps.parameters(), settings.lr, weight_decay=settings.weight_decay)
    x, y = _on(device, x_ND), _padded(targets, device)
    x_val, y_val = _on(device, validation_x), _padded(validation_targets, device)
    counted = torch.tensor([[[float(number < size)] for number in range(max(sizes))] for size in sizes])
    counted = (counted / counted.sum(1, keepdim=True)).transpose(1, 2).to(device)  # (P, 1, K): a mean over its own

    def errors_of(batch_x: torch.Tensor, batch_y: torch.Tensor) -> torch.Tensor:
        """The mean squared error of each MLP, (P,)."""
        return ((mlps(batch_x) - batch_y).square() * counted).sum(-1).mean(-1)

    best = torch.full((len(targets),), math.inf, device=device)
    waited, kept = torch.zeros(len(targets), device=device), copy.deepcopy(mlps)
    order = torch.Generator().manual_seed(derive_seed(*seed, _ORDER))
    for epoch in range(settings.epochs):
        for rows in torch.randperm(len(x), generator=order).to(device).split(settings.batch):
            optimizer.zero_grad()
            errors_of(x[rows], y[:, rows]).sum().backward()  # a sum: none feels the others
            optimizer.step()
        with torch.no_grad():
            parts = zip(x_val.split(CHUNK), y_val.split(CHUNK, dim=1), strict=True)
            found = torch.stack([errors_of(*part) * len(part[0]) for part in parts]).sum(0) / len(x_val)
            better = (found < best) & (waited < settings.patience)
            best = torch.where(better, found, best)
            waited = torch.where(better, 0, waited + 1)
            for old, new in zip(kept.parameters(), mlps.parameters(), strict=True):
                old[better] = new[better]
        if on_epoch:
            on_epoch(epoch + 1)
        if bool((waited >= settings.patience).all()):
            break

    @torch.no_grad()
    def predict(new_nD: Array) -> list[Array]:
        parts = [kept(part).cpu() for part in _on(device, new_nD).split(CHUNK)]
        predicted = torch.cat(parts, dim=1).double().numpy()
        return [numbers[:, :size] for numbers, size in zip(predicted, sizes, strict=True)]

    return predict


def _on(device: torch.device, values: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values, np.float32)).to(device)


def _padded(targets: Sequence[Array], device: torch.device) -> torch.Tensor:
    """Targets (n, K_p) as one tensor (P, n, K), with zeros where one has fewer numbers than the largest."""
    most = max(target.shape[1] for target in targets)
    return torch.stack([F.pad(_on(device, target), (0, most - target.shape[1])) for target in targets])
