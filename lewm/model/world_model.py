"""LeWorldModel: an encoder and a predictor that share one latent space (paper, Eq. "LeWM").

    Encoder:     z_t      = enc(o_t)
    Predictor:   ẑ_{t+1}  = pred(z_t, a_t)

The training objective, Algorithm 1 of the paper, is ``train/objective.py``.
"""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lewm import checkpoint
from lewm.checked import from_dict, to_dict
from lewm.config import ModelConfig
from lewm.errors import CheckpointError, ConfigError, PlanningError
from lewm.model.predictor import ActionEmbedder, Predictor
from lewm.model.rollout import FastRollout
from lewm.model.vit import ViT
from lewm.types import ActionStats, EncoderFunction, RolloutFunction


class Projector(nn.Sequential):
    """MLP with BatchNorm (N, W) -> (N, D).

    The transformer in front ends in a LayerNorm, which pins every vector's norm; without this projection its
    outputs could never become Gaussian.
    """

    def __init__(self, width: int, hidden: int, embed_dim: int) -> None:
        super().__init__(nn.Linear(width, hidden), nn.BatchNorm1d(hidden), nn.GELU(), nn.Linear(hidden, embed_dim))


class LeWM(nn.Module):
    """A latent world model. Shapes as in ``lewm.types``; actions are z-scored blocks unless called raw.

    Args:
        config: the architecture.
        action_stats: the training data's action statistics. A model without them can be trained and rolled
            out on z-scored actions, but cannot be given or asked for raw ones.
        recorded_actions: raw sequences of the training data, float32 (N, T, action_dim), for planners to try.
    """

    def __init__(
        self, config: ModelConfig, action_stats: ActionStats | None = None, recorded_actions: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.action_stats = action_stats
        self.recorded_actions = recorded_actions
        self._stats_of_kind: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}
        self.encoder = ViT(config.encoder)
        self.projector = Projector(config.encoder.width, config.projector_width, config.embed_dim)
        self.action_embedder = ActionEmbedder(config.block_dim, config.action_bottleneck, config.embed_dim)
        self.predictor = Predictor(config)
        self.prediction_projector = Projector(config.embed_dim, config.projector_width, config.embed_dim)

    history = property(lambda self: self.config.history)
    frame_skip = property(lambda self: self.config.frame_skip)
    action_dim = property(lambda self: self.config.action_dim)
    image_size = property(lambda self: self.config.encoder.image_size)

    @property
    def device(self) -> torch.device:
        return self.predictor.positions.device

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """z = enc(o): uint8 frames (..., R, R, 3) -> embeddings (..., D)."""
        self._check_pixels(pixels)
        leading, frame = pixels.shape[:-3], pixels.shape[-3:]
        z = self.projector(self.encoder(pixels.reshape(-1, *frame)))
        return z.view(*leading, -1)

    def predict(self, z_BTD: torch.Tensor, actions_BTA: torch.Tensor) -> torch.Tensor:
        """ẑ_{t+1} = pred(z_1..t, a_1..t) for every t at once, T <= history -> (B, T, D)."""
        return self._predict_next(z_BTD, self.action_embedder(actions_BTA))

    def rollout(self, z_BTD: torch.Tensor, past_BTA: torch.Tensor, actions_BSHA: torch.Tensor) -> torch.Tensor:
        """Imagine S futures from each of B contexts: predictions (B, S, H, D).

        z_BTD: embeddings of the T real frames, oldest first.  past_BTA: the T-1 action blocks executed between
        them.  actions_BSHA: candidate plans; their first block acts on the last real frame. Predictions feed
        back into a window of the last ``history`` embeddings.
        """
        b, s, horizon, _ = actions_BSHA.shape
        context = z_BTD.shape[1]
        if past_BTA.shape[1] != context - 1:
            raise PlanningError(
                f"A context of {context} frames needs the {context - 1} action blocks between them, "
                f"got {past_BTA.shape[1]}."
            )
        z = z_BTD.unsqueeze(1).expand(-1, s, -1, -1).flatten(0, 1)
        past = past_BTA.unsqueeze(1).expand(-1, s, -1, -1)
        action = self.action_embedder(torch.cat([past, actions_BSHA], dim=2).flatten(0, 1))
        for end in range(context, context + horizon):
            start = max(0, end - self.history)
            z_next = self._predict_next(z[:, start:end], action[:, start:end])[:, -1:]
            z = torch.cat([z, z_next], dim=1)
        return z[:, context:].view(b, s, horizon, -1)

    def planning_rollout(self, precision: str = "auto", differentiable: bool = False) -> RolloutFunction:
        """``rollout`` for a planner, with a frozen copy of the weights: the same predictions for less work.

        precision: "float32", "bf16", or "auto": bf16 on CUDA.  differentiable: gradients with respect to the actions.
        """
        from lewm.model import rollout_cluster, rollout_triton

        bf16 = self._plans_in_bf16(precision)
        if bf16 and not differentiable and rollout_cluster.supports(self):
            try:
                return rollout_cluster.ClusterRollout(self)
            except (OSError, RuntimeError) as error:  # no compiler, or one that does not know this GPU
                warnings.warn(f"Planning goes without its fastest kernel: {error}", stacklevel=2)
        if bf16 and not differentiable and rollout_triton.supports(self):
            return rollout_triton.TritonRollout(self)
        return FastRollout(self, torch.bfloat16 if bf16 else torch.float32)

    def planning_encoder(self, precision: str = "auto") -> EncoderFunction:
        """``encode`` for a planner, in a precision as for ``planning_rollout``, with a frozen copy of the weights."""
        if not self._plans_in_bf16(precision):
            return self.encode
        # Products are bf16 as in training. Their weights are converted now, not at every call.
        frozen = copy.deepcopy(self)
        frozen.encoder.use_kernels(attention=False, mlp=False)  # they are for a training step's hundreds of frames
        for module in [*frozen.encoder.blocks.modules(), *frozen.projector]:
            if isinstance(module, nn.Linear):
                module.to(torch.bfloat16)

        def encode(pixels: torch.Tensor) -> torch.Tensor:
            with torch.autocast(pixels.device.type, torch.bfloat16):
                return frozen.encode(pixels).float()

        return encode

    def _plans_in_bf16(self, precision: str) -> bool:
        return precision == "bf16" or (precision == "auto" and self.device.type == "cuda")

    def normalise_actions(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw primitive actions (..., K, action_dim) -> z-scored blocks (..., A)."""
        mean, std = self._stats_on(raw)
        return ((raw - mean) / std).flatten(-2)

    def denormalise_actions(self, blocks: torch.Tensor) -> torch.Tensor:
        """z-scored blocks (..., A) -> raw primitive actions (..., K, action_dim)."""
        mean, std = self._stats_on(blocks)
        return blocks.unflatten(-1, (self.frame_skip, self.action_dim)) * std + mean

    def _predict_next(self, z_BTD: torch.Tensor, action_BTD: torch.Tensor) -> torch.Tensor:
        x_BTD = self.predictor(z_BTD, action_BTD)
        return self.prediction_projector(x_BTD.flatten(0, 1)).view_as(x_BTD)

    def _check_pixels(self, pixels: torch.Tensor) -> None:
        expected = (self.image_size, self.image_size, 3)
        if tuple(pixels.shape[-3:]) != expected or pixels.dtype != torch.uint8:
            raise PlanningError(
                f"Expected uint8 frames of shape (..., {', '.join(map(str, expected))}), got {pixels.dtype} of "
                f"shape {tuple(pixels.shape)}. Render or resize them to the model's {self.image_size} pixels."
            )

    def _stats_on(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.action_stats is None:
            raise PlanningError(
                "This model has no action statistics, so raw actions cannot be converted. Imported weights get "
                "them with `lewm import-official ... --dataset FILE`."
            )
        kind = (like.device, like.dtype)
        if kind not in self._stats_of_kind:
            # Kept: to copy them to a GPU each time would make the host wait, and could not be recorded in a CUDA graph.
            with torch.inference_mode(False):
                stats = self.action_stats
                self._stats_of_kind[kind] = (like.new_tensor(stats.mean), like.new_tensor(stats.std))
        return self._stats_of_kind[kind]

    # -- files -----------------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write weights, configuration, statistics and recorded actions; ``extra`` joins config.json."""
        description = self.describe() | (extra or {})
        return checkpoint.save_model(directory, self.state_dict(), description, actions=self.recorded_actions)

    def describe(self) -> dict[str, Any]:
        """What a checkpoint's config.json says about this model, besides its weights."""
        stats = self.action_stats
        return {
            "model": to_dict(self.config),
            "action_stats": stats and {"mean": list(stats.mean), "std": list(stats.std)},
        }

    @classmethod
    def from_pretrained(cls, source: str | Path, device: str | torch.device = "auto") -> LeWM:
        """Load a model, in evaluation mode and float32.

        source: a folder, a run's folder, the name of a model that comes with lewm ("pusht"), or a Hugging Face
        repository id. Loading is strict: missing, extra or misshapen tensors and damaged files are errors.
        """
        directory = checkpoint.resolve(source)
        tensors, document = checkpoint.load_model(directory)
        model = cls.from_description(document)
        checkpoint.check_tensors(tensors, model.state_dict(), directory)
        model.load_state_dict(tensors)
        model.recorded_actions = checkpoint.load_actions(directory, document)
        return model.to(resolve_device(device)).eval()

    @classmethod
    def from_description(cls, document: dict[str, Any]) -> LeWM:
        """An untrained model with the architecture and statistics that ``describe`` returned."""
        if "model" not in document:
            raise CheckpointError("config.json has no 'model' section: this is not a lewm checkpoint.")
        stats = document.get("action_stats")
        action_stats = ActionStats(tuple(stats["mean"]), tuple(stats["std"])) if stats else None
        return cls(from_dict(ModelConfig, document["model"], "model."), action_stats)


def resolve_device(device: str | torch.device) -> torch.device:
    """``"auto"`` is CUDA, then MPS, then the CPU."""
    if device == "auto":
        mps = "mps" if torch.backends.mps.is_available() else "cpu"
        return torch.device("cuda" if torch.cuda.is_available() else mps)
    try:
        torch.empty(0, device=device)
        return torch.device(device)
    except (RuntimeError, AssertionError) as error:  # torch raises either, for unknown names and missing devices
        raise ConfigError(f"Device {str(device)!r} cannot be used here: {error}".splitlines()[0]) from error
