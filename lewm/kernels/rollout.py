"""Which planning rollout suits a model and the device it is on."""

from __future__ import annotations

import warnings

import torch

from lewm.kernels import rollout_cluster, rollout_triton
from lewm.kernels.network import Network
from lewm.kernels.rollout_cluster import ClusterRollout
from lewm.kernels.rollout_fast import FastRollout
from lewm.kernels.rollout_triton import TritonRollout
from lewm.types import RolloutFunction


def planning_dtype(precision: str, device: torch.device) -> torch.dtype:
    """The arithmetic that "float32", "bf16" or "auto" stands for; the last is bf16 on CUDA."""
    bf16 = precision == "bf16" or (precision == "auto" and device.type == "cuda")
    return torch.bfloat16 if bf16 else torch.float32


def choose_rollout(model: Network, precision: str = "auto", differentiable: bool = False) -> RolloutFunction:
    """The fastest rollout with a frozen copy of a model's weights.

    precision: see ``planning_dtype``.  differentiable: gradients with respect to the actions. Kernels are made for bf16
    and compute no gradients.
    """
    dtype = planning_dtype(precision, model.device)
    if dtype == torch.float32 or differentiable:
        return FastRollout(model, dtype)
    if rollout_cluster.supports(model):
        try:
            return ClusterRollout(model)
        except (OSError, RuntimeError) as error:  # no compiler, or one that does not know this GPU
            warnings.warn(f"Planning goes without its fastest kernel: {error}", stacklevel=3)
    return TritonRollout(model) if rollout_triton.supports(model) else FastRollout(model, dtype)
