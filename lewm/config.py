"""Every setting of a run in one frozen object.

The defaults reproduce the paper (where its text and the released configuration differ, the latter, and the comment says
so). Values are checked on construction: a config that exists makes sense. A method's own settings are in its file, and
what a world needs is in ``presets.py``.
"""

from __future__ import annotations

import typing
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from lewm.checked import Checked, free, free_section
from lewm.errors import ConfigError
from lewm.types import DataFacts, Inputs

if TYPE_CHECKING:
    from lewm.methods.base import Method

SolverName = Literal["cem", "icem", "mppi", "sgd", "rmsprop", "adam"]
ScheduleName = Literal["whole", "receding", "shrinking", "soonest"]
SCHEDULES: tuple[ScheduleName, ...] = typing.get_args(ScheduleName)
LARGEST_IMAGE = 4096  # pixels
LARGEST_LAYER = 1 << 16  # units
LARGEST_BLOCK = 10_000  # frames, actions or numbers


@dataclass(frozen=True)
class EncoderConfig(Checked):
    """What turns a frame into one vector. Defaults: ViT-Tiny/14 at 224 pixels."""

    SECTION: ClassVar[str] = "method.encoder"

    image_size: int = 224  # Side of the square frames, in pixels.
    # A vision transformer, or the paper's other backbone: its size is set, and what is said below is of the first.
    kind: Literal["vit", "resnet18"] = "vit"
    patch_size: int = 14  # Side of a patch, in pixels.
    depth: int = 12  # Transformer layers.
    heads: int = 3  # Attention heads.
    width: int = 192  # Size of a token.
    mlp_width: int = 768  # Hidden size of the MLPs.
    kept_patches: int = 0  # Only so many patches of a frame are looked at, those least like the background; 0: all.
    background_noise: float = 0.0  # Grey levels by which a patch differs on average and is still background.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("image_size", "patch_size", most=LARGEST_IMAGE)
        self._check_positive("depth", "heads", "width", "mlp_width", most=LARGEST_LAYER)
        if self.kind == "vit":
            fits = self.image_size % self.patch_size == 0
            self._require(fits, "image_size", f"a multiple of {self.patch_size} (patch)")
            self._require(self.width % self.heads == 0, "width", f"a multiple of {self.heads} (heads)")
            within = 0 <= self.kept_patches <= self.patches
            self._require(within, "kept_patches", f"between 0 and the {self.patches} patches of a frame")
        self._require(self.background_noise >= 0, "background_noise", "at least 0")

    @property
    def patches(self) -> int:
        """How many patches a frame has."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def needs_background(self) -> bool:
        """Whether patches that look like the background are left out."""
        return self.kind == "vit" and self.kept_patches > 0

    @property
    def out_width(self) -> int:
        """Size of the vector that it makes of a frame."""
        return 512 if self.kind == "resnet18" else self.width

    @property
    def title(self) -> str:
        """What it is and what it looks at, in few words."""
        if self.kind != "vit":
            return f"ResNet-18 at {self.image_size} px"
        whole = f"ViT/{self.patch_size} at {self.image_size} px"
        if not self.kept_patches:
            return whole
        noise = f", give or take {self.background_noise:g} of 255" if self.background_noise else ""
        return f"{whole}, {self.kept_patches} of {self.patches} patches (least like the background{noise})"


@dataclass(frozen=True)
class PredictorConfig(Checked):
    """The causal transformer that predicts the next embedding; its width is the embedding's."""

    SECTION: ClassVar[str] = "method.predictor"

    depth: int = 6  # Transformer layers.
    heads: int = 16  # Attention heads.
    head_width: int = 64  # Size of a head; heads * head_width may exceed the embedding.
    mlp_width: int = 2048  # Hidden size of the MLPs.
    dropout: float = 0.1  # Share of units dropped in training.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("depth", "heads", "head_width", "mlp_width", most=LARGEST_LAYER)
        self._require(0 <= self.dropout < 1, "dropout", "in [0, 1)")


@dataclass(frozen=True)
class MethodConfig(Checked, ABC):
    """A method's settings: the flags ``--method.FIELD``, and what a checkpoint says of it. NAME: how users call it."""

    NAME: ClassVar[str]
    SECTION: ClassVar[str] = "method"

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if not isinstance(getattr(cls, "NAME", None), str):
            raise TypeError(f"{cls.__name__} needs a NAME: what users type after --method.")

    @abstractmethod
    def inputs(self) -> Inputs:
        """What its training windows hold."""

    @classmethod
    @abstractmethod
    def for_preset(cls, preset: Preset) -> tuple[MethodConfig, TrainConfig]:
        """Its own size and recipe for a world."""

    @abstractmethod
    def build(self, facts: DataFacts) -> Method:
        """An untrained model."""

    @property
    def needs_background(self) -> bool:
        """Whether it wants to know what frames look like without what moves."""
        return False

    def rows(self) -> dict[str, str]:
        """What it is, in few words, by what: for `lewm info` and model cards."""
        return {}


@dataclass(frozen=True)
class JEPAConfig(Checked):
    """An encoder and a predictor that share a latent space: what LeWM and PLDM have in common."""

    SECTION: ClassVar[str] = "method"

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    embed_dim: int = 192  # Size of an embedding.
    projector_width: int = 2048  # Hidden size of the two projectors.
    history: int = 3  # Frames the predictor sees. The paper's text has 1 for TwoRoom, its checkpoint 3.
    frame_skip: int = 5  # Environment steps, and so primitive actions, from one frame to the next.
    action_dim: int = 2  # Size of a primitive action.
    action_bottleneck: int = 10  # An action block is first reduced to this many numbers.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("embed_dim", "projector_width", "action_bottleneck", most=LARGEST_LAYER)
        self._check_positive("history", "frame_skip", "action_dim", most=LARGEST_BLOCK)

    @property
    def block_dim(self) -> int:
        """A, the size of a flattened action block."""
        return self.frame_skip * self.action_dim

    @property
    def needs_background(self) -> bool:
        """Patches that look like the background are left out."""
        return self.encoder.needs_background

    def inputs(self) -> Inputs:
        """Windows of ``history`` frames and the one after them."""
        return Inputs(self.history + 1, self.frame_skip, self.action_dim, self.encoder.image_size)

    @classmethod
    def sized(cls, preset: Preset, **rest: Any) -> Self:
        """Networks that suit a world: the released ones in full size, small ones for two CPU cores."""
        size = preset.image_size
        if preset.size == "full":
            seen = EncoderConfig(size, kept_patches=preset.moving_patches or 0, background_noise=preset.line_noise)
            return cls(seen, action_dim=preset.action_dim, **rest)
        if preset.size == "compact":  # a small embedding suits a world of two numbers
            encoder = EncoderConfig(size, depth=2, heads=2, width=32, mlp_width=128)
            predictor = PredictorConfig(depth=2, heads=4, head_width=16, mlp_width=128)
            return cls(encoder, predictor, 32, 128, action_dim=preset.action_dim, **rest)
        encoder = EncoderConfig(size, depth=1, heads=2, width=16, mlp_width=32)
        predictor = PredictorConfig(depth=1, heads=2, head_width=8, mlp_width=32)
        return cls(encoder, predictor, 8, 16, action_dim=preset.action_dim, **rest)

    def rows(self) -> dict[str, str]:
        """What it is, in few words, by what."""
        vit = self.encoder
        layers = f": {vit.depth} layers of width {vit.width}" if vit.kind == "vit" else ""
        predictor = f"{self.predictor.depth} layers, embedding of {self.embed_dim}, history {self.history}"
        return {"encoder": vit.title + layers, "predictor": predictor}


@dataclass(frozen=True)
class TrainConfig(Checked):
    """Optimisation, logging and checkpoints."""

    SECTION: ClassVar[str] = "train"

    steps: int = 100_000  # Optimiser steps.
    batch_size: int = 128  # Windows per step, of all processes together.
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of transformer blocks, AdamW for the rest.
    lr: float = 5e-5  # Peak learning rate.
    weight_decay: float = 1e-3  # On all parameters.
    clip_norm: float = 1.0  # Largest norm of the gradient.
    warmup_steps: int = 1000  # Steps of linear warm-up.
    final_lr_fraction: float = 0.01  # After the warm-up a cosine falls to this share of the peak.
    schedule_steps: int | None = None  # Where the cosine ends; None: at the last step. Released: ten times later.
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 on CUDA.
    calibration_batches: int = 16  # On which BatchNorm's statistics are measured for both; 0: running averages.
    compile: Literal["auto", "on", "off"] = free("auto")  # auto: on CUDA.
    cuda_graph: bool = free(True)  # Capture a whole step once and replay it, on one CUDA device.
    fused: bool = free(True)  # Kernels of our own for the encoder's attention and MLPs, where they fit (CUDA, bf16).
    log_every: int = free(50)  # Steps between measurements.
    val_every: int = free(500)  # Steps between validations.
    val_batches: int = free(8)  # Batches of a validation.
    checkpoint_every: int = free(500)  # Steps between checkpoints.
    keep_every: int = free(0)  # Steps between small models that stay, in RUN/series, to look back at; 0: none.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("steps", "lr", "clip_norm", "log_every", "val_every", "val_batches", "checkpoint_every")
        self._require(self.keep_every >= 0, "keep_every", "at least 0")
        self._require(self.batch_size <= 10**6, "batch_size", f"at most {10**6:,}")
        self._require(self.batch_size >= 2, "batch_size", "at least 2 (BatchNorm looks at whole batches)")
        self._require(self.weight_decay >= 0, "weight_decay", "at least 0")
        self._require(self.calibration_batches >= 0, "calibration_batches", "at least 0")
        self._require(self.warmup_steps >= 0, "warmup_steps", "at least 0")
        self._require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", "in [0, 1]")
        self._require(self.schedule_steps is None or self.schedule_steps > 0, "schedule_steps", "positive")

    def check_schedule(self) -> None:
        """Refuse a learning rate that never comes down. Runs of earlier versions may have one, and are read."""
        end, name = self.steps, "steps"
        if self.schedule_steps is not None and self.schedule_steps < end:
            end, name = self.schedule_steps, "schedule_steps"
        self._require(self.warmup_steps < end, "warmup_steps", f"less than train.{name} ({end})")


@dataclass(frozen=True)
class LoaderConfig(Checked):
    """How windows are drawn from a dataset."""

    SECTION: ClassVar[str] = "loader"

    val_fraction: float = 0.1  # Share of the episodes held out for validation.
    # Decoded frames in the device's memory or the machine's if they fit, else on disk; the others insist.
    cache: Literal["auto", "memory", "ram", "disk"] = free("auto")
    threads: int = free(2)  # Threads that decode frames.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(0 < self.val_fraction < 1, "val_fraction", "between 0 and 1")
        self._check_positive("threads", most=1024)


@dataclass(frozen=True)
class CollectConfig(Checked):
    """A dataset to generate."""

    SECTION: ClassVar[str] = "collect"

    episodes: int = 10_000  # Expert episodes.
    resolution: int = 224  # Side of a frame, in pixels.
    workers: int = 0  # Processes; 0: one per core. The content does not depend on it.
    frame_stride: int = 1  # Draw and keep one frame in so many only; training's frame_skip must be a multiple of it.
    demos: str | None = None  # Demonstrations to replay: an .npz file, or a LeRobot dataset (folder or hub name).
    exploration: float = 0.0  # Up to this share of an episode's actions are not the expert's.
    mistakes: float = 0.0  # For up to this share the expert takes its object to be elsewhere (cube).

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("episodes", most=10**8)
        self._check_positive("resolution", "frame_stride", most=LARGEST_IMAGE)
        self._require(self.workers <= LARGEST_BLOCK, "workers", f"at most {LARGEST_BLOCK}")
        for name in ("exploration", "mistakes"):
            self._require(0 <= getattr(self, name) < 1, name, "in [0, 1)")
        self._require(self.workers >= 0, "workers", "at least 0")


@dataclass(frozen=True)
class IcemConfig(Checked):
    """What only iCEM has."""

    SECTION: ClassVar[str] = "plan.icem"

    noise_exponent: float = 0.5  # Power of 1/f with which noise is smooth in time; 0 is white.
    recorded: int = 0  # First iterations that try recorded actions; later noise is correlated as these are.
    kept_elites: float = 0.3  # Share of the elites that compete again in the next iteration.
    momentum: float = 0.1  # Share of the old distribution in the new one.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.recorded >= 0, "recorded", "at least 0")
        self._require(0 <= self.kept_elites < 1, "kept_elites", "in [0, 1)")
        self._require(0 <= self.momentum < 1, "momentum", "in [0, 1)")


@dataclass(frozen=True)
class MppiConfig(Checked):
    """What only MPPI has."""

    SECTION: ClassVar[str] = "plan.mppi"

    temperature: float = 0.3  # In standard deviations of the costs; lower trusts the best candidates more.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("temperature")


@dataclass(frozen=True)
class GradientConfig(Checked):
    """What only the gradient solvers sgd, rmsprop and adam have."""

    SECTION: ClassVar[str] = "plan.gradient"

    restarts: int = 16  # Plans that are improved side by side.
    lr: float = 0.3  # Size of the first steps, in z-scored actions; falls to 0 in the last.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("restarts", "lr", most=10**6)


@dataclass(frozen=True)
class PlanConfig(Checked):
    """How plans are searched for (docs/guide/plan-and-act.md has the solvers) and executed (and the schedules)."""

    SECTION: ClassVar[str] = "plan"

    solver: SolverName = "cem"  # How to search.
    schedule: ScheduleName = "whole"  # When to replan, and how far to look.
    horizon: int = 5  # Action blocks that a plan looks ahead.
    samples: int = 300  # Candidate plans per iteration, for cem, icem and mppi.
    iterations: int = 30  # The paper's text has 10 outside Push-T, its released code 30 everywhere.
    elites: int = 30  # Best candidates, to which cem and icem fit the next distribution.
    init_std: float = 1.0  # Of the first distribution, in z-scored actions.
    objective: Literal["terminal", "nearest"] = "terminal"  # Which imagined distance counts: the last, or the least.
    warm_start: bool = False  # Begin each search from the rest of the previous plan.
    action_limit: float | None = None  # Bound on the size of raw actions; None: none, as in the paper.
    budget_ms: float | None = None  # Stop a search after so many milliseconds, with the plan so far.
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 on CUDA, float32 elsewhere.
    cuda_graph: bool = True  # Capture a search once and replay it, on CUDA.
    batch_size: int = 50  # Episodes planned together on a GPU.
    icem: IcemConfig = field(default_factory=IcemConfig)
    mppi: MppiConfig = field(default_factory=MppiConfig)
    gradient: GradientConfig = field(default_factory=GradientConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("horizon", "batch_size", most=LARGEST_BLOCK)
        self._check_positive("samples", "iterations", "init_std", most=10**6)
        if self.solver in ("cem", "icem"):
            self._require(2 <= self.elites <= self.samples, "elites", f"between 2 and plan.samples ({self.samples})")
        if self.icem.recorded > self.iterations:
            raise ConfigError(
                f"plan.icem.recorded must be at most plan.iterations ({self.iterations}), got {self.icem.recorded}."
            )
        # It looks for the nearest place at each horizon, so it has an objective of its own.
        fits = self.schedule != "soonest" or self.objective == "terminal"
        self._require(fits, "objective", "terminal with the schedule soonest")
        for name in ("action_limit", "budget_ms"):
            self._require(getattr(self, name) is None or getattr(self, name) > 0, name, "positive")


@dataclass(frozen=True)
class EvalConfig(Checked):
    """What is evaluated (paper: 50 pairs, goal 25 steps ahead, budget 50); docs/guide/evaluate.md has the protocols."""

    SECTION: ClassVar[str] = "eval"

    episodes: int = 50  # Pairs taken from the start of the manifest.
    budget: int = 50  # Primitive actions allowed per episode.
    manifest: str | None = None  # "paper" (None: this) or "strict", the frozen pairs; or a file of your own.
    workers: int = free(0)  # Processes that hold environments; 1: none; 0: one per core for slow simulators, else none.

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("episodes", "budget", most=10**7)
        self._require(0 <= self.workers <= LARGEST_BLOCK, "workers", f"between 0 and {LARGEST_BLOCK}")


@dataclass(frozen=True)
class Preset:
    """A world, and what it asks of any method. What a method makes of it is for the method to say (``for_preset``).

    image_size: pixels of its frames.  action_dim: of a primitive action.  size: "debug" exercises every part in
    seconds, "compact" suits two CPU cores and minutes, "full" a GPU.  moving_patches: at most so many of a frame's
    256 patches show anything that moves, None: unknown.  line_noise: grey levels by which drivers draw the same lines
    differently.
    """

    name: str
    env: str
    action_dim: int
    size: Literal["debug", "compact", "full"]
    image_size: int = 224
    moving_patches: int | None = None
    line_noise: float = 0.0
    collect: CollectConfig = field(default_factory=CollectConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def at_its_pace(self, train: TrainConfig) -> TrainConfig:
        """A method's recipe, with as many measurements and checkpoints as suit a run of this size."""
        if self.size == "debug":
            return replace(train, log_every=2, val_every=4, val_batches=1, checkpoint_every=4)
        if self.size == "compact":
            return replace(train, log_every=20, val_every=250)
        return replace(train, val_every=1000, checkpoint_every=2000)


@dataclass(frozen=True)
class Config(Checked):
    """One run, from data to evaluation. Saved beside the weights; enough to repeat it."""

    method: MethodConfig  # What learns, and how it is built.
    env: str = "lewm/TwoRoom-v0"  # Gymnasium id of the environment, or its short name.
    seed: int = 0  # Everything random derives from it.
    data: Path | None = free(None)  # The dataset file.
    out: Path | None = free(None)  # The run's folder.
    device: str = free("auto")  # auto: cuda, then mps, then cpu.
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    collect: CollectConfig = free_section(CollectConfig)
    plan: PlanConfig = free_section(PlanConfig)
    eval: EvalConfig = free_section(EvalConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(self.seed >= 0, "seed", "at least 0")
