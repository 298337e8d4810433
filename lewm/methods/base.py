"""What every method offers to the rest of the house, which knows methods through this alone.

A method says what its windows hold (``MethodConfig.inputs``), what its losses are, which random numbers a step needs,
and what of it is compiled and calibrated. It can be planned with (``lewm.types.WorldModel``) or it acts
(``lewm.types.Actor``). docs/guide/add-a-method.md writes one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import nn

from lewm.config import MethodConfig
from lewm.errors import CheckpointError, PlanningError
from lewm.types import ActionStats, Array, Batch, DataFacts, Losses, Peers


@dataclass(frozen=True)
class Group:
    """Parameters that are trained alike.

    learning_rate: their share of the run's.  clip: groups of one name are clipped together, by the norm of all of them.
    muon: whether a run that chose Muon takes it for them.
    """

    parameters: tuple[nn.Parameter, ...]
    learning_rate: float = 1.0
    clip: str = ""
    muon: bool = False


def blocks_apart(module: nn.Module) -> list[Group]:
    """The matrices of transformer blocks, for which a run may take Muon, and all other parameters."""
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    matrices = {p for name, p in named if ".blocks." in name and p.ndim == 2}
    others = tuple(p for _, p in named if p not in matrices)
    return [Group(others), Group(tuple(p for _, p in named if p in matrices), muon=True)]


class Method(nn.Module, ABC):
    """A module with losses. Shapes as in ``lewm.types``.

    Args:
        settings: its configuration.
        facts: what it learned of its data before training. Without action statistics a method can be trained, but
            cannot be given or asked for raw actions.
    """

    # What to do when its embeddings no longer differ; None: they are not learned.
    COLLAPSE_REMEDY: ClassVar[str | None] = "Lower train.lr."

    def __init__(self, settings: MethodConfig, facts: DataFacts | None = None) -> None:
        super().__init__()
        self.settings, self.facts = settings, facts or DataFacts()
        self.inputs = settings.inputs()
        self._stats_of_kind: dict[tuple[torch.device, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    @abstractmethod
    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:
        """What is minimised on this process's part of a batch that ``peers`` share; draws: as ``draws`` returned."""

    def draws(self, seed: int, step: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Random numbers of a step, a pure function of (seed, step); the same for all processes."""
        del seed, step, device
        return {}

    def groups(self) -> list[Group]:
        """Everything that is trained, each parameter once."""
        return [Group(tuple(parameter for parameter in self.parameters() if parameter.requires_grad))]

    def frozen(self) -> Iterable[nn.Module]:
        """Modules that are never trained: they stay in evaluation mode, and files name them instead of holding them."""
        return ()

    def compiled(self, compile: Callable[[Any], Any]) -> Self:
        """A view that shares every parameter and buffer, with parts replaced by what ``compile`` makes of them."""
        del compile
        return self

    def after_step(self) -> None:
        """Whatever follows the optimiser's step, in place: it may be captured with the step."""

    def calibrate(self, batches: Iterable[Batch]) -> None:
        """Measure statistics for the weights as they are, before the method is validated or saved."""

    def use_kernels(self, enabled: bool) -> None:
        """Whether to take kernels of our own where they fit."""

    def remarks(self, frames: Array) -> list[str]:
        """What frames of the data, uint8 (N, R, R, 3), say against the settings; asked if it needs a background."""
        del frames
        return []

    # -- what it looks at and does ---------------------------------------------------------------------------------

    @property
    def history(self) -> int:
        """Frames that it looks at to plan or act."""
        return self.inputs.frames

    @property
    def frame_skip(self) -> int:
        return self.inputs.frame_skip

    @property
    def action_dim(self) -> int:
        return self.inputs.action_dim

    @property
    def image_size(self) -> int:
        """Side of the frames that it looks at."""
        assert self.inputs.image_size is not None
        return self.inputs.image_size

    @property
    def proprio_dim(self) -> int:
        """P, how many numbers it wants of what the agent senses of itself, with each frame; 0: it reads none."""
        return len(self.facts.proprio.mean) if self.inputs.proprio and self.facts.proprio else 0

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def action_stats(self) -> ActionStats | None:
        return self.facts.actions

    @property
    def recorded_actions(self) -> torch.Tensor | None:
        """Raw sequences of the training data, float32 (N, T, action_dim), for planners to try."""
        return self.facts.recorded

    def normalise_actions(self, raw: torch.Tensor) -> torch.Tensor:
        """Raw primitive actions (..., K, action_dim) -> z-scored blocks (..., A); whole numbers as float32."""
        raw = raw if raw.is_floating_point() else raw.float()
        mean, std = self._stats_on(raw)
        return ((raw - mean) / std).flatten(-2)

    def denormalise_actions(self, blocks: torch.Tensor) -> torch.Tensor:
        """z-scored blocks (..., A) -> raw primitive actions (..., K, action_dim); whole numbers as float32."""
        blocks = blocks if blocks.is_floating_point() else blocks.float()
        mean, std = self._stats_on(blocks)
        return blocks.unflatten(-1, (self.frame_skip, self.action_dim)) * std + mean

    def check_frames(self, pixels: torch.Tensor) -> None:
        """Refuse what are not uint8 frames (..., R, R, 3) of its size."""
        expected = (self.image_size, self.image_size, 3)
        if tuple(pixels.shape[-3:]) != expected or pixels.dtype != torch.uint8:
            raise PlanningError(
                f"Expected uint8 frames of shape (..., {', '.join(map(str, expected))}), got {pixels.dtype} of "
                f"shape {tuple(pixels.shape)}. Render or resize them to the model's {self.image_size} pixels."
            )

    def _stats_on(self, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stats = self.action_stats
        if stats is None:
            raise PlanningError(
                "This model has no action statistics, so raw actions cannot be converted. Imported weights get "
                "them with `lewm import-official ... --dataset FILE`."
            )
        kind = (like.device, like.dtype)
        if kind not in self._stats_of_kind:
            # Kept: to copy them to a GPU each time would make the host wait, and could not be captured in a CUDA graph.
            with torch.inference_mode(False):
                self._stats_of_kind[kind] = (like.new_tensor(stats.mean), like.new_tensor(stats.std))
        return self._stats_of_kind[kind]

    # -- training mode and files -----------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Self:
        """As ``nn.Module.train``, but for what is frozen: its BatchNorms would drift."""
        super().train(mode)
        for module in self.frozen():
            module.eval()
        return self

    def own_state(self) -> dict[str, torch.Tensor]:
        """Its tensors by name, in order, without those of frozen modules: what is saved."""
        elsewhere = set(self._frozen_names())
        return {name: tensor for name, tensor in self.state_dict().items() if name not in elsewhere}

    def load_own_state(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take over what ``own_state`` returned, strictly."""
        self.load_state_dict(self.state_dict() | tensors)

    def _frozen_names(self) -> Iterator[str]:
        frozen = {id(tensor) for module in self.frozen() for tensor in module.state_dict(keep_vars=True).values()}
        return (name for name, tensor in self.state_dict(keep_vars=True).items() if id(tensor) in frozen)

    @classmethod
    def from_pretrained(cls, source: str | Path, device: str | torch.device = "auto") -> Self:
        """Load a model of this method, as ``lewm.load`` does."""
        from lewm.methods.files import load

        method = load(source, device)
        if not isinstance(method, cls):
            problem = f"{source} holds a model of the method {method.settings.NAME!r}, not a {cls.__name__}"
            raise CheckpointError(f"{problem}. `lewm.load` gives a model of any method.")
        return method

    def save_pretrained(self, directory: str | Path, extra: dict[str, Any] | None = None) -> Path:
        """Write all that rebuilds it; ``extra`` joins config.json."""
        from lewm.methods.files import save

        return save(self, Path(directory), extra)
