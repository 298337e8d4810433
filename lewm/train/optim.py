"""AdamW and its learning-rate schedule."""

from __future__ import annotations

import math

import torch
from torch import nn

from lewm.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then constant or a cosine down to ``final_lr_fraction`` of the peak; a function of the step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    end = config.schedule_steps or config.steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over all parameters, fused where the device has it."""
    fused = next(model.parameters()).device.type == "cuda"
    return torch.optim.AdamW(model.parameters(), lr=config.lr, weight_decay=config.weight_decay, fused=fused)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """AdamW's state as flat named tensors, ``PARAMETER/moment``: a form that needs no pickle."""
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
