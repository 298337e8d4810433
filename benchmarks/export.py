"""What rounding a model's tensors to bf16 costs: why `lewm export` rounds matrices only.

    python benchmarks/export.py --model runs/demo/training --data runs/demo/dataset.h5

Prints one table: which tensors are rounded, the relative change of embeddings and of imagined futures (five blocks
ahead, random actions), and what the weights of the full-size model then weigh.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from lewm.data.store import EpisodeStore
from lewm.methods.lewm import LeWM
from lewm.presets import preset

CONTEXTS, SAMPLES, HORIZON = 64, 8, 5
HEADER = ("rounded", "embedding, mean", "worst", "imagined, mean", "worst", "full size")
Rule = Callable[[torch.Tensor, bool], bool]
# Of a tensor, given whether it is a parameter (or a statistic of BatchNorm): is it rounded?
RULES: dict[str, Rule] = {
    "everything": lambda _, __: True,
    "parameters": lambda _, parameter: parameter,
    "matrices (`lewm export`)": lambda tensor, parameter: parameter and tensor.ndim > 1,
    "vectors": lambda tensor, parameter: parameter and tensor.ndim == 1,
    "BatchNorm's statistics": lambda _, parameter: not parameter,
}


def chosen(model: LeWM, rule: Rule) -> set[str]:
    """The names of the tensors that a rule rounds."""
    parameters, tensors = dict(model.named_parameters()), model.state_dict()
    return {name for name, t in tensors.items() if t.is_floating_point() and rule(t, name in parameters)}


def rounded(model: LeWM, rule: Rule) -> LeWM:
    """A copy with the chosen tensors rounded."""
    names, result = chosen(model, rule), copy.deepcopy(model)
    result.load_state_dict({k: t.bfloat16().float() if k in names else t for k, t in model.state_dict().items()})
    return result


def outputs(model: LeWM, frames: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings (N, D) of the frames and futures (B, S, H, D) imagined from them."""
    z, history, size = model.encode(frames), model.history, model.settings.block_dim
    noise = torch.Generator().manual_seed(0)
    past = torch.randn(CONTEXTS, history - 1, size, generator=noise)
    actions = torch.randn(CONTEXTS, SAMPLES, HORIZON, size, generator=noise)
    return z, model.rollout(z[: CONTEXTS * history].view(CONTEXTS, history, -1), past, actions)


@torch.inference_mode()
def main() -> None:
    """Measure every rule, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a trained model in float32")
    parser.add_argument("--data", type=Path, required=True, help="a dataset to take frames from")
    options = parser.parse_args()
    model, full = LeWM.from_pretrained(options.model, device="cpu"), LeWM(preset("pusht").method)
    with EpisodeStore(options.data) as store:
        places = np.linspace(0, store.num_frames - 1, 400).astype(int)
        frames = torch.from_numpy(store.read_frames(store.frame_rows[places]))
    before = outputs(model, frames)
    print(f"| {' | '.join(HEADER)} |\n|{' --- |' * len(HEADER)}")
    for name, rule in RULES.items():
        after, halved = outputs(rounded(model, rule), frames), chosen(full, rule)
        changes = [(b - a).norm(dim=-1) / a.norm(dim=-1) for a, b in zip(before, after, strict=True)]
        figures = [f"{100 * value:.2f} %" for change in changes for value in (change.mean(), change.max())]
        size = sum(t.numel() * (2 if k in halved else t.element_size()) for k, t in full.state_dict().items())
        print(f"| {name} | {' | '.join(figures)} | {size / 1e6:.1f} MB |", flush=True)


if __name__ == "__main__":
    main()
