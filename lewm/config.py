"""Every setting of a run in one frozen object, with named presets.

The defaults reproduce the paper (where its text and the released configuration differ, the latter, and the comment says
so). A preset changes only what it must; those of full size also train faster. Values are checked on construction: a
config that exists makes sense.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from lewm.errors import ConfigError, unknown_name

T = TypeVar("T")
SolverName = Literal["cem", "icem", "mppi", "sgd", "rmsprop", "adam"]
ScheduleName = Literal["whole", "receding", "shrinking", "soonest"]
SCHEDULES: tuple[ScheduleName, ...] = typing.get_args(ScheduleName)


class _Checked:
    """Checks shared by all sections: ``_require`` names the section, the field and what came."""

    def _require(self, ok: bool, name: str, wanted: str) -> None:
        if not ok:
            section = type(self).__name__.removesuffix("Config").removesuffix("Args").lower()
            field_name = f"{section}.{name}" if section else name
            raise ConfigError(f"{field_name} must be {wanted}, got {getattr(self, name)}.")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            self._require(getattr(self, name) > 0, name, "positive")

    def _check_choices(self) -> None:
        for name, hint in typing.get_type_hints(type(self)).items():
            if typing.get_origin(hint) is Literal and getattr(self, name) not in (known := typing.get_args(hint)):
                section = type(self).__name__.removesuffix("Config").lower()
                raise ConfigError(unknown_name(f"{section}.{name}", str(getattr(self, name)), known))


@dataclass(frozen=True)
class EncoderConfig(_Checked):
    """The vision transformer. Defaults: ViT-Tiny/14 at 224 pixels."""

    image_size: int = 224  # Side of the square frames, in pixels.
    patch_size: int = 14  # Side of a patch, in pixels.
    depth: int = 12  # Transformer layers.
    heads: int = 3  # Attention heads.
    width: int = 192  # Size of a token.
    mlp_width: int = 768  # Hidden size of the MLPs.
    kept_patches: int = 0  # Only so many patches of a frame are looked at, those least like the background; 0: all.
    background_noise: float = 0.0  # Grey levels by which a patch differs on average and is still background.

    def __post_init__(self) -> None:
        self._check_positive("image_size", "patch_size", "depth", "heads", "width", "mlp_width")
        self._require(self.image_size % self.patch_size == 0, "image_size", f"a multiple of {self.patch_size} (patch)")
        self._require(self.width % self.heads == 0, "width", f"a multiple of {self.heads} (heads)")
        within = 0 <= self.kept_patches <= self.patches
        self._require(within, "kept_patches", f"between 0 and the {self.patches} patches of a frame")
        self._require(self.background_noise >= 0, "background_noise", "at least 0")

    @property
    def patches(self) -> int:
        """How many patches a frame has."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def title(self) -> str:
        """What it is and what it looks at, in few words."""
        whole = f"ViT/{self.patch_size} at {self.image_size} px"
        if not self.kept_patches:
            return whole
        noise = f", give or take {self.background_noise:g} of 255" if self.background_noise else ""
        return f"{whole}, {self.kept_patches} of {self.patches} patches (least like the background{noise})"


@dataclass(frozen=True)
class PredictorConfig(_Checked):
    """The causal transformer that predicts the next embedding; its width is the embedding's."""

    depth: int = 6  # Transformer layers.
    heads: int = 16  # Attention heads.
    head_width: int = 64  # Size of a head; heads * head_width may exceed the embedding.
    mlp_width: int = 2048  # Hidden size of the MLPs.
    dropout: float = 0.1  # Share of units dropped in training.

    def __post_init__(self) -> None:
        self._check_positive("depth", "heads", "head_width", "mlp_width")
        self._require(0 <= self.dropout < 1, "dropout", "in [0, 1)")


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """The whole world model."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    predictor: PredictorConfig = field(default_factory=PredictorConfig)
    embed_dim: int = 192  # Size of an embedding.
    projector_width: int = 2048  # Hidden size of the two projectors.
    history: int = 3  # Frames the predictor sees. The paper's text has 1 for TwoRoom, its checkpoint 3.
    frame_skip: int = 5  # Environment steps, and so primitive actions, from one frame to the next.
    action_dim: int = 2  # Size of a primitive action.
    action_bottleneck: int = 10  # An action block is first reduced to this many numbers.

    def __post_init__(self) -> None:
        self._check_positive("embed_dim", "projector_width", "history", "frame_skip", "action_dim", "action_bottleneck")

    @property
    def block_dim(self) -> int:
        """A, the size of a flattened action block."""
        return self.frame_skip * self.action_dim


@dataclass(frozen=True)
class SigregConfig(_Checked):
    """Sketched isotropic Gaussian regularisation."""

    weight: float = 0.09  # Lambda. The paper's text has 0.1.
    directions: int = 1024  # Random projections per step.
    knots: int = 17  # Points of the quadrature.
    t_min: float = 0.0  # Where the quadrature starts. The paper's appendix has 0.2.
    t_max: float = 3.0  # Where it ends. The paper's appendix has 4.

    def __post_init__(self) -> None:
        self._check_positive("directions")
        self._require(self.weight >= 0, "weight", "at least 0")
        self._require(self.knots >= 2, "knots", "at least 2")
        self._require(0 <= self.t_min < self.t_max, "t_min", f"at least 0 and below t_max ({self.t_max})")


@dataclass(frozen=True)
class TrainConfig(_Checked):
    """Optimisation, logging and checkpoints."""

    steps: int = 100_000  # Optimiser steps.
    coarse_steps: int = 0  # The first so many see frames at half resolution, for a fraction of the work.
    batch_size: int = 128  # Windows per step, of all processes together.
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of transformer blocks, AdamW for the rest.
    lr: float = 5e-5  # Peak learning rate.
    weight_decay: float = 1e-3  # On all parameters.
    clip_norm: float = 1.0  # Largest norm of the gradient.
    warmup_steps: int = 1000  # Steps of linear warm-up.
    schedule: Literal["cosine", "constant"] = "cosine"  # Learning rate after the warm-up.
    final_lr_fraction: float = 0.01  # The cosine falls to this share of the peak.
    schedule_steps: int | None = None  # Where the cosine ends; None: at the last step. Released: ten times later.
    ema: float = 0.0  # Decay of a moving average of the weights, which is then what checkpoints hold; 0: none.
    precision: Literal["auto", "float32", "bf16", "mixed"] = "auto"  # auto: bf16 on CUDA. mixed: float32 tokens.
    compile: Literal["auto", "on", "off", "max-autotune"] = "auto"  # auto: on CUDA. max-autotune tries more kernels.
    cuda_graph: bool = True  # Record a whole step once and replay it, on one CUDA device.
    fused: bool = True  # Kernels of our own for the encoder's attention and MLPs, where they fit (CUDA, bf16).
    attention: Literal["auto", "cudnn", "flash", "efficient", "math", "default"] = "auto"  # auto: fused, else cudnn.
    prefetch: int = 2  # Batches prepared ahead of the step, on CUDA.
    log_every: int = 50  # Steps between measurements.
    val_every: int = 500  # Steps between validations.
    val_batches: int = 8  # Batches of a validation.
    checkpoint_every: int = 500  # Steps between checkpoints.
    calibration_batches: int = 16  # On which BatchNorm's statistics are measured for both; 0: running averages.
    keep_checkpoints: int = 2  # So many of the newest are kept.

    def __post_init__(self) -> None:
        self._check_positive("steps", "lr", "clip_norm", "log_every", "val_every", "val_batches", "checkpoint_every")
        self._check_positive("keep_checkpoints")
        self._require(self.batch_size >= 2, "batch_size", "at least 2 (BatchNorm and SIGReg look at whole batches)")
        # A run that ended coarse would leave a model that has never seen the frames it is for.
        within = 0 <= self.coarse_steps < self.steps
        self._require(within, "coarse_steps", f"at least 0 and below train.steps ({self.steps})")
        self._require(self.weight_decay >= 0, "weight_decay", "at least 0")
        self._require(self.calibration_batches >= 0, "calibration_batches", "at least 0")
        self._require(self.warmup_steps >= 0, "warmup_steps", "at least 0")
        self._require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", "in [0, 1]")
        self._require(self.schedule_steps is None or self.schedule_steps > 0, "schedule_steps", "positive")
        self._require(self.schedule in ("cosine", "constant"), "schedule", "cosine or constant")
        known = ("auto", "float32", "bf16", "mixed")
        self._require(self.precision in known, "precision", "auto, float32, bf16 or mixed")
        self._require(0 <= self.ema < 1, "ema", "in [0, 1)")
        self._require(self.prefetch >= 0, "prefetch", "at least 0")
        self._check_choices()


@dataclass(frozen=True)
class LoaderConfig(_Checked):
    """How windows are drawn from a dataset."""

    val_fraction: float = 0.1  # Share of the episodes held out for validation.
    split_seed: int = 3072  # Decides which episodes.
    # Decoded frames in the device's memory or the machine's if they fit, else on disk; the others insist.
    cache: Literal["auto", "memory", "ram", "disk"] = "auto"
    threads: int = 2  # Threads that decode frames.

    def __post_init__(self) -> None:
        self._require(0 < self.val_fraction < 1, "val_fraction", "between 0 and 1")
        self._require(self.cache in ("auto", "memory", "ram", "disk"), "cache", "auto, memory, ram or disk")
        self._check_positive("threads")


@dataclass(frozen=True)
class CollectConfig(_Checked):
    """A dataset to generate."""

    episodes: int = 10_000  # Expert episodes.
    resolution: int = 224  # Side of a frame, in pixels.
    workers: int = 0  # Processes; 0: one per core. The content does not depend on it.
    frame_stride: int = 1  # Draw and keep every so-manieth frame only; training's frame_skip must be a multiple of it.
    demos: str | None = None  # Demonstrations to replay: an .npz file, or a LeRobot dataset (folder or hub name).
    exploration: float = 0.0  # Up to this share of an episode's actions are not the expert's.
    mistakes: float = 0.0  # For up to this share the expert takes its object to be elsewhere (cube).

    def __post_init__(self) -> None:
        self._check_positive("episodes", "resolution", "frame_stride")
        for name in ("exploration", "mistakes"):
            self._require(0 <= getattr(self, name) < 1, name, "in [0, 1)")
        self._require(self.workers >= 0, "workers", "at least 0")


@dataclass(frozen=True)
class PlanConfig(_Checked):
    """How plans are searched for (docs/planning.md has the solvers) and executed (and the schedules)."""

    solver: SolverName = "cem"  # How to search.
    horizon: int = 5  # Action blocks that a plan looks ahead.
    samples: int = 300  # Candidate plans per iteration, for cem, icem and mppi.
    iterations: int = 30  # The paper's text has 10 outside Push-T, its released code 30 everywhere.
    elites: int = 30  # Best candidates, to which the next distribution is fitted.
    init_std: float = 1.0  # Of the first distribution, in z-scored actions.
    noise_exponent: float = 0.5  # iCEM: power of 1/f with which noise is smooth in time; 0 is white.
    recorded: int = 0  # iCEM: first iterations that try recorded actions; later noise is correlated as these are.
    kept_elites: float = 0.3  # iCEM: share of the elites that compete again in the next iteration.
    momentum: float = 0.1  # iCEM: share of the old distribution in the new one.
    temperature: float = 0.3  # MPPI: in standard deviations of the costs; lower trusts the best candidates more.
    restarts: int = 16  # Gradient solvers: plans that are improved side by side.
    lr: float = 0.3  # Gradient solvers: size of the first steps, in z-scored actions; falls to 0 in the last.
    objective: Literal["terminal", "summed", "nearest"] = "terminal"  # Which imagined distance counts.
    effort: float = 0.0  # Weight of the actions' mean square, added to the distance.
    schedule: ScheduleName = "whole"  # When to replan, and how far to look.
    execute: int | None = None  # Blocks executed before replanning; None: whole plans with "whole", else 1.
    warm_start: bool = False  # Begin each search from the rest of the previous plan.
    action_limit: float | None = None  # Bound on the size of raw actions; None: none, as in the paper.
    stop_spread: float | None = None  # Stop a search when its candidates' standard deviation falls below this.
    budget_ms: float | None = None  # Stop a search after so many milliseconds, with the plan so far.
    precision: Literal["auto", "float32", "bf16"] = "auto"  # auto: bf16 on CUDA, float32 elsewhere.
    cuda_graph: bool = True  # Record a search once and replay it, on CUDA.
    batch_size: int = 50  # Episodes planned together on a GPU.

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_positive("horizon", "samples", "iterations", "init_std", "temperature", "restarts", "lr")
        self._check_positive("batch_size")
        if self.solver in ("cem", "icem"):
            self._require(2 <= self.elites <= self.samples, "elites", f"between 2 and plan.samples ({self.samples})")
        within = 0 <= self.recorded <= self.iterations
        self._require(within, "recorded", f"between 0 and plan.iterations ({self.iterations})")
        self._require(0 <= self.kept_elites < 1, "kept_elites", "in [0, 1)")
        self._require(0 <= self.momentum < 1, "momentum", "in [0, 1)")
        self._require(self.effort >= 0, "effort", "at least 0")
        # It looks for the nearest place at each horizon, so it has an objective of its own.
        fits = self.schedule != "soonest" or self.objective == "terminal"
        self._require(fits, "objective", "terminal with the schedule soonest")
        within = self.execute is None or 1 <= self.execute <= self.horizon
        self._require(within, "execute", f"between 1 and plan.horizon ({self.horizon})")
        for name in ("action_limit", "stop_spread", "budget_ms"):
            self._require(getattr(self, name) is None or getattr(self, name) > 0, name, "positive")


@dataclass(frozen=True)
class EvalConfig(_Checked):
    """What is evaluated (paper: 50 pairs, goal 25 steps ahead, budget 50); docs/evaluation.md has the protocols."""

    episodes: int = 50  # Pairs taken from the start of the manifest.
    budget: int = 50  # Primitive actions allowed per episode.
    manifest: str | None = None  # "paper" (None: this) or "strict", the frozen pairs; or a file of your own.
    workers: int = 0  # Processes that hold environments; 1: none; 0: one per core for slow simulators, else none.

    def __post_init__(self) -> None:
        self._check_positive("episodes", "budget")
        self._require(self.workers >= 0, "workers", "at least 0")


@dataclass(frozen=True)
class Config(_Checked):
    """One run, from data to evaluation. Saved beside the weights; enough to repeat it."""

    env: str = "lewm/TwoRoom-v0"  # Gymnasium id of the environment, or its short name.
    seed: int = 0  # Everything random derives from it.
    data: Path | None = None  # The dataset file.
    out: Path | None = None  # The run's folder.
    device: str = "auto"  # auto: cuda, then mps, then cpu.
    collect: CollectConfig = field(default_factory=CollectConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    sigreg: SigregConfig = field(default_factory=SigregConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        self._require(self.seed >= 0, "seed", "at least 0")
        encoder, coarse_steps = self.model.encoder, self.train.coarse_steps
        side = encoder.image_size // encoder.patch_size
        if coarse_steps > 0 and side % 2:
            raise ConfigError(
                f"train.coarse_steps must be 0 for an encoder of {side} x {side} patches, which cannot be halved, got "
                f"{coarse_steps}. Half resolution needs model.encoder.image_size to be a multiple of "
                f"{2 * encoder.patch_size}."
            )
        if coarse_steps > 0 and encoder.kept_patches:
            raise ConfigError(
                f"train.coarse_steps must be 0 when model.encoder.kept_patches ({encoder.kept_patches}) leaves patches "
                f"out, got {coarse_steps}. Both save the same work: a quarter of the patches costs as much as half the "
                "resolution. Set one of the two to 0."
            )


def _demo() -> Config:
    """Small enough for two CPU cores and a few minutes; a small embedding suits a world of two numbers."""
    encoder = EncoderConfig(image_size=56, depth=2, heads=2, width=32, mlp_width=128)
    predictor = PredictorConfig(depth=2, heads=4, head_width=16, mlp_width=128)
    return Config(
        collect=CollectConfig(episodes=400, resolution=56),
        model=ModelConfig(encoder, predictor, embed_dim=32, projector_width=128),
        sigreg=SigregConfig(directions=256),
        train=TrainConfig(steps=2000, batch_size=64, lr=3e-3, warmup_steps=100, log_every=20, val_every=250),
        plan=PlanConfig(samples=128, iterations=10, elites=16),
    )


def _debug() -> Config:
    """The smallest run that still exercises every part; for tests and for trying out changes."""
    encoder = EncoderConfig(image_size=28, depth=1, heads=2, width=16, mlp_width=32)
    predictor = PredictorConfig(depth=1, heads=2, head_width=8, mlp_width=32)
    steps = TrainConfig(steps=8, batch_size=4, lr=1e-3, warmup_steps=2)
    return Config(
        collect=CollectConfig(episodes=8, resolution=28, workers=1),
        model=ModelConfig(encoder, predictor, embed_dim=8, projector_width=16),
        sigreg=SigregConfig(directions=16),
        train=dataclasses.replace(steps, log_every=2, val_every=4, val_batches=1, checkpoint_every=4),
        plan=PlanConfig(horizon=2, samples=8, iterations=3, elites=2),
        eval=EvalConfig(episodes=2, budget=10),
    )


def _full_size(
    env: str, action_dim: int, *, steps: int, kept_patches: int, background_noise: float = 0.0, sigreg: float = 0.09
) -> Config:
    """The released network, looking at the patches in which anything moves, with a recipe for minutes on a GPU.

    docs/training.md has the released one.
    """
    encoder = EncoderConfig(kept_patches=kept_patches, background_noise=background_noise)
    train = TrainConfig(steps=steps, optimizer="muon", lr=2e-3, warmup_steps=300)
    return Config(
        env=env,
        model=ModelConfig(encoder, action_dim=action_dim),
        sigreg=SigregConfig(weight=sigreg),
        train=dataclasses.replace(train, val_every=1000, checkpoint_every=2000),
        loader=LoaderConfig(threads=8),  # enough to read frames from disk as fast as a GPU wants them
    )


# What moves covers at most 12, 22, 14 and 78 of a frame's 256 patches (benchmarks/background.py). With a lighter lambda
# TwoRoom's and Reacher's distances reach farther (docs/planning.md); Cube's needs to be heavier (docs/cube.md).
# Drivers draw the lines of MuJoCo's floors a little differently, hence the background noise.
_tworoom = partial(_full_size, "lewm/TwoRoom-v0", 2, steps=12_000, kept_patches=16, sigreg=0.005)
_pusht = partial(_full_size, "lewm/PushT-v0", 2, steps=20_000, kept_patches=32)
_reacher = partial(_full_size, "lewm/Reacher-v0", 2, steps=12_000, kept_patches=16, background_noise=1.0, sigreg=0.005)
_cube = partial(_full_size, "lewm/Cube-v0", 5, steps=50_000, kept_patches=64, background_noise=1.0, sigreg=0.3)

PRESETS: dict[str, Callable[[], Config]] = {
    "debug": _debug,
    "demo": _demo,
    "tworoom": _tworoom,
    "pusht": _pusht,
    "reacher": _reacher,
    "cube": _cube,
}


def preset(name: str) -> Config:
    """The named preset; an unknown name raises with the nearest one."""
    if name not in PRESETS:
        raise ConfigError(unknown_name("preset", name, PRESETS))
    return PRESETS[name]()


def to_dict(config: Any) -> dict[str, Any]:
    """A config as plain JSON values."""

    def plain(fields: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: str(value) if isinstance(value, Path) else value for name, value in fields}

    return dataclasses.asdict(config, dict_factory=plain)


def from_dict(cls: type[T], values: dict[str, Any], where: str = "") -> T:
    """Build a config from plain JSON values; an unknown field raises with the nearest name."""
    hints = typing.get_type_hints(cls)
    fields = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
    kwargs = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(unknown_name("field", where + name, (where + f for f in fields)))
        if dataclasses.is_dataclass(hints[name]) and isinstance(value, dict):
            value = from_dict(hints[name], value, f"{where}{name}.")
        elif Path in typing.get_args(hints[name]) and value is not None:
            value = Path(value)
        kwargs[name] = value
    return cls(**kwargs)
