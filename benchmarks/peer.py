"""The public implementation (`stable-worldmodel`), for side-by-side measurements.

Importing the package would pull in every environment, so its files are loaded past the package's ``__init__``: the
network, and the CEM solver. Install it without dependencies: ``pip install --no-deps stable-worldmodel einops loguru``.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lewm import LeWM
from lewm.methods.official import import_official
from lewm.types import DataFacts

MLP = {"input_dim": 192, "output_dim": 192, "hidden_dim": 2048, "norm_fn": "BatchNorm1d"}
CONFIG: dict[str, dict[str, Any]] = {
    "encoder": {"size": "tiny", "patch_size": 14, "image_size": 224, "use_mask_token": False},
    "predictor": {
        **{"num_frames": 3, "input_dim": 192, "hidden_dim": 192, "output_dim": 192},
        **{"depth": 6, "heads": 16, "dim_head": 64, "mlp_dim": 2048},
    },
    "action_encoder": {"input_dim": 10, "emb_dim": 192},
    "projector": MLP,
    "pred_proj": MLP,
}


def load(name: str) -> types.ModuleType:
    """A module of the public package, its parents replaced by empty packages."""
    if "stable_worldmodel" not in sys.modules:
        spec = importlib.util.find_spec("stable_worldmodel")
        if spec is None or not spec.submodule_search_locations:
            raise SystemExit("Install the public package first: pip install --no-deps stable-worldmodel einops loguru")
        root = Path(spec.submodule_search_locations[0])
        for parent in ("", ".wm", ".wm.lewm", ".solver", ".data", ".data.formats"):
            package = types.ModuleType(f"stable_worldmodel{parent}")
            package.__path__ = [str(root / parent.replace(".", "/").strip("/"))]
            sys.modules[package.__name__] = package
    return importlib.import_module(f"stable_worldmodel.{name}")


def build_network(seed: int = 0) -> nn.Module:
    """The public network at full size with random weights everywhere, in evaluation mode."""
    from transformers import ViTConfig, ViTModel

    torch.manual_seed(seed)
    parts = load("wm.lewm.module")
    vit = ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=224,
        patch_size=14,
    )
    mlps = [parts.MLP(**{**MLP, "norm_fn": nn.BatchNorm1d}) for _ in range(2)]
    network = load("wm.lewm.lewm").LeWM(
        ViTModel(vit, add_pooling_layer=False),
        parts.Predictor(**CONFIG["predictor"]),
        parts.Embedder(**CONFIG["action_encoder"]),
        *mlps,
    )
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.05)
    for module in network.modules():
        if isinstance(module, nn.LayerNorm) and module.elementwise_affine:
            nn.init.ones_(module.weight)
    return network.eval()


def as_ours(network: nn.Module, folder: Path, action_stats: Any = None) -> LeWM:
    """Our model with the same weights, through the import of official checkpoints."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), folder / "weights.pt")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    out = import_official(folder / "weights.pt", folder / "config.json", folder / "ours", DataFacts(action_stats))
    return LeWM.from_pretrained(out, device="cpu")
