"""The optimiser and its learning-rate schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lewm.config import TrainConfig
from lewm.errors import CheckpointError, ConfigError
from lewm.methods.base import Method
from lewm.train.muon import MuonAdamW


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warm-up, then a cosine down to ``final_lr_fraction`` of the peak; a function of the step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    end = config.schedule_steps or config.steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, end - config.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.final_lr_fraction + (1 - config.final_lr_fraction) * cosine)


def make_optimizer(method: Method, config: TrainConfig) -> torch.optim.AdamW:
    """The configured optimiser; on CUDA fused, and such that its step can be captured as part of a CUDA graph."""
    device = method.device
    on_gpu = device.type == "cuda"
    groups = _merged(method, muon=config.optimizer == "muon")
    if config.optimizer == "muon" and not any(group["muon"] for group in groups):
        raise ConfigError(f"train.optimizer muon is for transformers; {method.settings.NAME} has none. Choose adamw.")
    for group in groups:
        # A captured step reads its learning rate from memory; a number would be captured with it.
        group["lr"] = torch.tensor(config.lr, device=device) if on_gpu else config.lr
    options: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": on_gpu, "capturable": on_gpu}
    kind = MuonAdamW if config.optimizer == "muon" else torch.optim.AdamW
    return kind(groups, lr=config.lr, **options)


def _merged(method: Method, muon: bool) -> list[dict[str, Any]]:
    """The method's groups as an optimiser wants them: those that are trained alike together, in the method's order."""
    place = {parameter: i for i, parameter in enumerate(method.parameters())}
    merged: dict[tuple[float, str, bool], list[nn.Parameter]] = {}
    for group in method.groups():
        merged.setdefault((group.learning_rate, group.clip, group.muon and muon), []).extend(group.parameters)
    return [
        {"params": sorted(parameters, key=place.__getitem__), "share": share, "clip": clip, "muon": by_muon}
        for (share, clip, by_muon), parameters in merged.items()
        if parameters
    ]


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of the next step, without waiting for the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(value * group["share"])
        else:
            group["lr"] = value * group["share"]


def clip_gradients(optimizer: torch.optim.Optimizer, largest: float) -> torch.Tensor:
    """Shrink the gradients of parameters that are clipped together to a norm; returns the sum of the norms, ()."""
    together: dict[str, list[nn.Parameter]] = {}
    for group in optimizer.param_groups:
        together.setdefault(group["clip"], []).extend(group["params"])
    norms = [nn.utils.clip_grad_norm_(parameters, largest) for parameters in together.values()]
    return norms[0] if len(norms) == 1 else torch.stack(norms).sum()


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, torch.Tensor]:
    """The optimiser's state as flat named tensors, ``PARAMETER/moment``: a form that needs no pickle."""
    return {
        f"{name}/{key}": torch.as_tensor(value)
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state[parameter].items()
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module, tensors: dict[str, torch.Tensor], source: Path
) -> None:
    """The inverse of ``optimizer_tensors``; source: where they come from, for messages."""
    parameters = dict(model.named_parameters())
    for key, value in tensors.items():
        name, _, moment = key.rpartition("/")
        parameter = parameters.get(name)
        if parameter is None or (value.ndim and value.shape != parameter.shape):
            raise CheckpointError(f"The optimiser's state in {source} does not fit the model: it has {key}.")
        # AdamW keeps its step counter on the CPU unless it is fused.
        on_device = moment != "step" or optimizer.defaults["fused"]
        optimizer.state[parameter][moment] = value.to(parameter.device) if on_device else value
