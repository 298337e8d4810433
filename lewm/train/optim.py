"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from lewm.config import TrainConfig
from lewm.train.muon import MuonAdamW


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to ``final_lr_fraction`` of the peak; a function of the step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    end = config.schedule_steps or config.steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """The configured optimiser; on CUDA fused, and such that its step can be recorded as part of a CUDA graph."""
    device = next(model.parameters()).device
    on_gpu = device.type == "cuda"
    # A recorded step reads its learning rate from memory; a number would be recorded with it.
    lr = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": on_gpu, "capturable": on_gpu}
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=lr, **options)
    matrices = [p for name, p in model.named_parameters() if ".blocks." in name and p.ndim == 2]
    chosen = set(matrices)
    return MuonAdamW([p for p in model.parameters() if p not in chosen], matrices, lr=lr, **options)


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of the next step, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value)
        else:
            group["lr"] = value


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimiser's state as flat named tensors, ``PARAMETER/moment``: a form that needs no pickle."""
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, torch.Tensor]
) -> None:
    """The inverse of ``optimizer_tensors``."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, moment = key.rsplit("/", 1)
        parameter = parameters[name]
        # AdamW keeps its step counter on the CPU unless it is fused.
        on_device = moment != "step" or optimizer.defaults["fused"]
        optimizer.state[parameter][moment] = value.to(parameter.device) if on_device else value
