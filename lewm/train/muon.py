"""Muon for the matrices of transformer blocks, AdamW for everything else.

Muon (Jordan et al., 2024, "Muon: an optimizer for hidden layers") orthogonalises the momentum of a weight matrix before
it steps along it: all directions in which the layer's output could change are then changed alike, while plain momentum
is dominated by few. Its steps are scaled to the size that AdamW's usually have (Liu et al., 2025, "Muon is scalable for
LLM training"), so that one learning rate serves both.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

# The quintic of Newton and Schulz that brings singular values near 1 in five iterations.
ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315
MOMENTUM = 0.95
STEP_SIZE = 0.2  # root mean square of AdamW's steps, in learning rates


class MuonAdamW(torch.optim.AdamW):
    """Muon over the groups that say ``muon``, of matrices (rows, columns); AdamW over the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both; a closure would have to be evaluated in between."""
        assert closure is None
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups
        for group in groups:
            if group["muon"]:
                self._step_matrices(group)
        return None

    def _step_matrices(self, group: dict[str, Any]) -> None:
        of_shape = defaultdict(list)
        for parameter in group["params"]:
            if parameter.grad is not None:
                of_shape[parameter.shape].append(parameter)
        for parameters in of_shape.values():
            self._muon_step(parameters, group["lr"], group["weight_decay"])

    def _muon_step(self, parameters: list[torch.Tensor], lr: float | torch.Tensor, weight_decay: float) -> None:
        """Matrices of one shape, together. Nothing in here waits for the device."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        for parameter in parameters:
            if "momentum" not in self.state[parameter]:
                self.state[parameter]["momentum"] = torch.zeros_like(parameter)
        momenta = [self.state[p]["momentum"] for p in parameters]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's
        scale = STEP_SIZE * max(parameters[0].shape) ** 0.5
        updates = orthogonalise(torch.stack(ahead)) * (lr * scale)
        torch._foreach_mul_(parameters, 1 - lr * weight_decay)
        torch._foreach_sub_(parameters, updates.unbind())


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """(N, rows, columns) -> the same with all singular values near 1 (about 0.7 to 1.2); computed in bf16 on CUDA."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=B, alpha=C)
        x = torch.baddbmm(x, polynomial, x, beta=A)
    return (x.mT if tall else x).to(matrices.dtype)
