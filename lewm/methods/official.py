"""Import of the authors' checkpoints: a ``weights.pt`` state dict and the Hydra ``config.json`` beside it.

Both networks compute the same function, so an import only renames and reshapes. It is strict in both directions: every
official tensor is used and every tensor of ours is filled, because one renamed key that goes unnoticed leaves a part of
the model random. What the official configuration says and ``LeWMConfig`` cannot express is refused, not approximated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from lewm import checkpoint
from lewm.config import EncoderConfig, PredictorConfig
from lewm.errors import CheckpointError, ConfigError
from lewm.files import check_place, read_json
from lewm.methods.lewm import LeWM, LeWMConfig
from lewm.types import DataFacts

# Our names of tensors beside the official ones; "#" stands for a number, "*" for a last word.
_OFFICIAL_NAMES = {
    "encoder.cls_token": "encoder.embeddings.cls_token",
    "encoder.positions": "encoder.embeddings.position_embeddings",
    "encoder.patches.project.*": "encoder.embeddings.patch_embeddings.projection.*",
    "encoder.blocks.#.attention_norm.*": "encoder.layers.#.layernorm_before.*",
    "encoder.blocks.#.attention.qkv.*": "encoder.layers.#.attention.{qkv}_proj.*",
    "encoder.blocks.#.attention.out.*": "encoder.layers.#.attention.o_proj.*",
    "encoder.blocks.#.mlp_norm.*": "encoder.layers.#.layernorm_after.*",
    "encoder.blocks.#.mlp.0.*": "encoder.layers.#.mlp.fc1.*",
    "encoder.blocks.#.mlp.2.*": "encoder.layers.#.mlp.fc2.*",
    "encoder.norm.*": "encoder.layernorm.*",
    "projector.#.*": "projector.net.#.*",
    "action_embedder.reduce.*": "action_encoder.patch_embed.*",
    "action_embedder.mlp.#.*": "action_encoder.embed.#.*",
    "predictor.positions": "predictor.pos_embedding",
    "predictor.blocks.#.modulation.#.*": "predictor.transformer.layers.#.adaLN_modulation.#.*",
    "predictor.blocks.#.attention.norm.*": "predictor.transformer.layers.#.attn.norm.*",
    "predictor.blocks.#.attention.qkv.*": "predictor.transformer.layers.#.attn.to_qkv.*",
    "predictor.blocks.#.attention.out.*": "predictor.transformer.layers.#.attn.to_out.0.*",
    "predictor.blocks.#.mlp.#.*": "predictor.transformer.layers.#.mlp.net.#.*",
    "predictor.norm.*": "predictor.transformer.norm.*",
    "prediction_projector.#.*": "pred_proj.net.#.*",
}

# The encoder is Hugging Face's ViT. The table has the names of transformers 5; these are those of 4.
_TRANSFORMERS_4 = {
    "encoder.layers.": "encoder.encoder.layer.",
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}

# All of depth 12, with heads of 64 and MLPs four times as wide.
_VIT_WIDTHS = {"tiny": 192, "small": 384, "base": 768}


def import_official(
    weights: Path, config: Path, out: Path, facts: DataFacts | None = None, frame_skip: int = 5
) -> Path:
    """Convert an official state dict (``.pt`` or ``.safetensors``) and its ``config.json`` into a model folder ``out``.

    ``out`` must be new or empty; a failed import writes nothing. The official layout holds neither ``frame_skip``, the
    primitive actions in an action block, nor ``facts`` of what it was trained on: its world, and the statistics of
    actions, without which the model cannot be given or asked for raw ones.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not an empty folder. Choose a new place for the import.")
    check_place(out, [weights, config])
    settings = _read_config(config, frame_skip)
    stats = facts.actions if facts else None
    if stats is not None and len(stats.mean) != settings.action_dim:
        problem = f"{len(stats.mean)} numbers per action in the statistics, {settings.action_dim} in {config}"
        raise CheckpointError(f"{problem}. Use the dataset that this checkpoint was trained on.")
    model = LeWM(settings, facts)
    tensors = _read_weights(weights)
    views = _official_views(model, transformers_4=any(name.startswith("encoder.encoder.") for name in tensors))
    checkpoint.check_tensors(tensors, views, weights)
    for name, view in views.items():
        view.copy_(tensors[name])
    checkpoint.write_folder(out, lambda folder: model.save_pretrained(folder, {"imported_from": weights.name}))
    return out


def _read_weights(path: Path) -> dict[str, torch.Tensor]:
    if path.suffix == ".safetensors":
        return checkpoint.read_tensors(path)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: expected the official state dict (weights.pt).")
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    # A damaged pickle can raise anything; whatever it is, the file is at fault.
    except Exception as error:
        raise CheckpointError(f"{path} is damaged or not a plain state dict: {error}") from error
    if not isinstance(tensors, dict) or not all(isinstance(t, torch.Tensor) for t in tensors.values()):
        raise CheckpointError(f"{path} is not a plain state dict: expected tensors by name and nothing else.")
    return tensors


def _official_views(model: LeWM, transformers_4: bool) -> dict[str, torch.Tensor]:
    """The model's tensors as the official ones are named and shaped: views, so filling them fills the model."""
    patch_size = model.settings.encoder.patch_size
    views: dict[str, torch.Tensor] = {}
    for ours, tensor in model.state_dict().items():
        name = _official_name(ours)
        if "{qkv}" in name:
            views |= {name.format(qkv=part): view for part, view in zip("qkv", tensor.chunk(3), strict=True)}
        elif ours == "encoder.patches.project.weight":
            # A convolution whose stride is its kernel is a linear layer on each patch; our patches are channels-last.
            views[name] = tensor.unflatten(1, (patch_size, patch_size, 3)).movedim(-1, 1)
        else:
            views[name] = tensor.unsqueeze(-1) if ours == "action_embedder.reduce.weight" else tensor
    for new, old in _TRANSFORMERS_4.items() if transformers_4 else ():
        views = {name.replace(new, old): view for name, view in views.items()}
    return views


def _official_name(ours: str) -> str:
    for pattern, template in _OFFICIAL_NAMES.items():
        regex = re.escape(pattern).replace(r"\#", r"(\d+)").replace(r"\*", r"(\w+)")
        if match := re.fullmatch(regex, ours):
            return re.sub(r"[#*]", "%s", template) % match.groups()
    raise KeyError(f"{ours} has no official name")


def _read_config(path: Path, frame_skip: int) -> LeWMConfig:
    """Our configuration of the network that an official config.json describes."""
    document = read_json(path)

    def get(section: str, name: str, default: Any = None, accepted: Sequence[Any] = ()) -> Any:
        values = document.get(section) if isinstance(document, dict) else None
        value = values.get(name, default) if isinstance(values, dict) else None
        if value is None:
            raise CheckpointError(f"{path} has no {section}.{name}: expected an official LeWM config.json.")
        if accepted and value not in accepted:
            raise CheckpointError(f"{path} has {section}.{name} = {value!r}; lewm can only represent {accepted}.")
        return value

    width = _VIT_WIDTHS[get("encoder", "size", "tiny", tuple(_VIT_WIDTHS))]
    image_size, patch_size = get("encoder", "image_size", 224), get("encoder", "patch_size", 16)
    # Only what no tensor's name or shape would give away is checked; tensors are compared afterwards.
    get("predictor", "emb_dropout", 0.0, accepted=(0.0,))
    for section in ("projector", "pred_proj"):
        get(section, "act_fn", "GELU", _spellings("GELU"))
        get(section, "norm_fn", "LayerNorm", _spellings("BatchNorm1d"))
    block = get("action_encoder", "input_dim", 10)
    if not isinstance(block, int) or frame_skip < 1 or block % frame_skip:
        problem = f"action_encoder.input_dim = {block}, which is not {frame_skip} actions of equal size"
        raise CheckpointError(f"{path} has {problem}. Give the frame_skip that this checkpoint was trained with.")
    try:
        return LeWMConfig(
            EncoderConfig(
                image_size, patch_size=patch_size, depth=12, heads=width // 64, width=width, mlp_width=4 * width
            ),
            PredictorConfig(
                depth=get("predictor", "depth"),
                heads=get("predictor", "heads"),
                head_width=get("predictor", "dim_head", 64),
                mlp_width=get("predictor", "mlp_dim"),
                dropout=get("predictor", "dropout", 0.0),
            ),
            embed_dim=get("predictor", "input_dim"),
            projector_width=get("projector", "hidden_dim"),
            history=get("predictor", "num_frames"),
            frame_skip=frame_skip,
            action_dim=block // frame_skip,
            action_bottleneck=get("action_encoder", "smoothed_dim", 10),
        )
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path} describes a network that cannot be built: {error}") from error


def _spellings(name: str) -> list[Any]:
    """The ways in which a Hydra configuration may name a torch.nn class without arguments."""
    target = {"_target_": f"torch.nn.{name}"}
    return [name, f"torch.nn.{name}", target, {**target, "_partial_": True}]
