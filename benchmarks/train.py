"""Training speed: our step beside the public recipe's, on the same data, in one run.

    python benchmarks/train.py [--device cuda] [--size full|compact|toy] [--steps 100] [--profile] [--json FILE]

Both train on windows of a TwoRoom dataset that is made first. Ours is what `lewm train` does, data included: first with
whole frames, then as `--cache` and `--kept-patches` say (TFLOP/s are always those of whole frames). The public recipe
is a Hugging Face ViT with the public predictor and SIGReg (`pip install --no-deps stable-worldmodel einops loguru`, and
transformers), eager, bf16 autocast, AdamW, once with batches from a DataLoader over HDF5 and once with a batch that is
on the device already. Its frames are normalised on the device, which flatters it.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import peer
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, default_collate

from lewm.config import CollectConfig, Config, EncoderConfig, PredictorConfig
from lewm.data.collect import collect
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows, split_episodes
from lewm.methods.lewm import LeWMConfig, SigregConfig
from lewm.presets import preset
from lewm.train.distributed import SINGLE
from lewm.train.loop import prepared
from lewm.train.trainer import Trainer, TrainingMonitor

H200_BF16 = 989e12  # dense, per second
SIZES = ("full", "compact", "toy")
WARM_UP = 10
LOADER_STEPS = 20  # at most, of the public loader: a step may take a second
OURS = "ours, data included"
Row = tuple[str, dict[str, float]]  # its name and what was measured


def benchmark_config(size: str, device: str, folder: Path, batch_size: int | None) -> Config:
    """The full-size network on whole frames, a model that two CPU cores can train, or one that only shows it works."""
    config = replace(preset("tworoom"), method=LeWMConfig())
    if size == "compact":
        encoder = EncoderConfig(image_size=112, depth=4, heads=2, width=96, mlp_width=384)
        predictor = PredictorConfig(depth=2, heads=4, head_width=32, mlp_width=384)
        config = replace(config, method=LeWMConfig(encoder, predictor, 96, 384, sigreg=SigregConfig(directions=256)))
    if size == "toy":
        small, few = EncoderConfig(image_size=28, depth=1, width=48), PredictorConfig(depth=1, heads=2)
        config = replace(config, method=LeWMConfig(small, few, 48, 96, sigreg=SigregConfig(directions=64)))
    default = 128 if size == "full" else 16
    train = replace(config.train, batch_size=batch_size or default, steps=1_000_000)
    return replace(config, device=device, data=folder / "data.h5", out=folder / "run", train=train)


def lewm_of(config: Config) -> LeWMConfig:
    """Its method: both recipes are of LeWM."""
    assert isinstance(config.method, LeWMConfig)
    return config.method


def step_flops(config: Config) -> float:
    """Floating-point operations of a step's matrix products; backward is twice forward. As the method is written down:
    what we leave out of the encoder's last layer counts as done."""
    m = lewm_of(config)
    e, p = m.encoder, m.predictor
    tokens = (e.image_size // e.patch_size) ** 2 + 1
    layer = 2 * tokens * e.width * (4 * e.width + 2 * e.mlp_width) + 4 * tokens**2 * e.width
    image = e.depth * layer + 2 * (tokens - 1) * 3 * e.patch_size**2 * e.width
    projector = 2 * m.projector_width * (e.width + m.embed_dim)
    inner = p.heads * p.head_width
    prediction = p.depth * 2 * m.embed_dim * (6 * m.embed_dim + 4 * inner + 2 * p.mlp_width)
    window = (m.history + 1) * (image + projector) + m.history * (prediction + 4 * m.projector_width * m.embed_dim)
    return 3.0 * config.train.batch_size * window


# -- the public recipe ------------------------------------------------------------------------------------------------


def public_network(config: LeWMConfig) -> nn.Module:
    """The public network in the sizes of ``config``, for training."""
    from transformers import ViTConfig, ViTModel

    parts, e, p, d = peer.load("wm.lewm.module"), config.encoder, config.predictor, config.embed_dim
    vit = ViTConfig(
        hidden_size=e.width,
        num_hidden_layers=e.depth,
        num_attention_heads=e.heads,
        intermediate_size=e.mlp_width,
        image_size=e.image_size,
        patch_size=e.patch_size,
    )
    predictor = parts.Predictor(
        **{"num_frames": config.history, "input_dim": d, "hidden_dim": d, "output_dim": d, "depth": p.depth},
        **{"heads": p.heads, "dim_head": p.head_width, "mlp_dim": p.mlp_width, "dropout": p.dropout},
    )
    hidden = {"hidden_dim": config.projector_width, "norm_fn": nn.BatchNorm1d}
    return peer.load("wm.lewm.lewm").LeWM(
        ViTModel(vit, add_pooling_layer=False),
        predictor,
        parts.Embedder(input_dim=config.block_dim, emb_dim=d),
        parts.MLP(input_dim=e.width, output_dim=d, **hidden),
        parts.MLP(input_dim=d, output_dim=d, **hidden),
    )


class PublicStep:
    """Forward, two losses, backward, clip, AdamW: eager, as a Lightning module with automatic optimisation does it."""

    def __init__(self, config: Config, device: torch.device) -> None:
        torch.manual_seed(0)
        self.config, self.device = config, device
        self.network: Any = public_network(lewm_of(config)).to(device).train()
        settings = lewm_of(config).sigreg
        self.sigreg = peer.load("wm.loss").SIGReg(settings.knots, settings.directions).to(device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=5e-5, weight_decay=1e-3)
        self.mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1)

    def __call__(self, pixels: torch.Tensor, actions: torch.Tensor) -> None:
        """pixels: uint8 (B, T, R, R, 3).  actions: float32 (B, T, A)."""
        pixels, actions = pixels.to(self.device, non_blocking=True), actions.to(self.device, non_blocking=True)
        frames = (pixels.movedim(-1, -3).float() / 255 - self.mean) / self.std
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            info = self.network.encode({"pixels": frames, "action": actions})
            emb, act = info["emb"], info["act_emb"]
            predicted = self.network.predict(emb[:, :-1], act[:, :-1])
            loss = F.mse_loss(predicted, emb[:, 1:]) + 0.09 * self.sigreg(emb.transpose(0, 1))
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        loss.item()  # logged at every step


class HDF5Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Windows by slicing an HDF5 file, one at a time, as the public loader does; each worker opens it for itself."""

    def __init__(self, path: Path, rows: np.ndarray) -> None:
        self.path, self.rows = path, rows
        self._file: h5py.File | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._file is None:
            self._file = h5py.File(self.path)
        rows = self.rows[index]
        first, last, skip = int(rows[0, 0]), int(rows[-1, -1]) + 1, rows.shape[1]
        pixels = self._file["pixels"][first:last][::skip].copy()  # read whole, then thinned: also the public way
        actions = np.nan_to_num(self._file["action"][first:last]).reshape(len(rows), -1)
        return torch.from_numpy(pixels), torch.from_numpy(actions)


def hdf5_windows(config: Config) -> HDF5Windows:
    """The training windows, in a file as the public writer makes it."""
    store = EpisodeStore(config.data)  # type: ignore[arg-type]
    train_ids, _ = split_episodes(store.num_episodes, config.loader.val_fraction)
    windows = Windows(store, None, train_ids, config.method.inputs())
    path = Path(config.data or "").with_name("public.h5")
    if not path.exists():
        with h5py.File(store.path) as ours, h5py.File(path, "w") as public:
            # A chunk per frame, not compressed: what the public writer makes.
            public.create_dataset("pixels", data=ours["pixels"], chunks=(1, *ours["pixels"].shape[1:]))
            public.create_dataset("action", data=ours["action"])
    return HDF5Windows(path, windows.rows(np.arange(len(windows))))


def hdf5_batches(config: Config, workers: int, pinned: bool) -> Iterator[Any]:
    loader = DataLoader(
        hdf5_windows(config),
        config.train.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=pinned,
        persistent_workers=workers > 0,
        # Not forked from a process that has threads and a GPU: its locks would be copied as they happen to be.
        multiprocessing_context="spawn" if workers else None,
    )
    while True:
        yield from loader


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(step: Callable[[], Any], steps: int, device: torch.device) -> dict[str, float]:
    """Milliseconds per step after a warm-up, and the most memory that was taken since it was last forgotten.

    Taken from the device, not what tensors hold: a captured step keeps its own, which no tensor shows.
    """
    warm_up = WARM_UP if device.type == "cuda" else 2
    for _ in range(warm_up):
        step()
    synchronise(device)
    started = time.perf_counter()
    for _ in range(steps):
        step()
    synchronise(device)
    seconds = (time.perf_counter() - started) / steps
    memory = torch.cuda.max_memory_reserved() / 2**30 if device.type == "cuda" else float("nan")
    return {"ms": 1000 * seconds, "gib": memory}


def forget_memory(device: torch.device) -> None:
    """Give back what nobody uses any more, and begin to measure anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Notes(TrainingMonitor):
    """Prints what a run has to say."""

    def note(self, message: str) -> None:
        print(message)

    def step(self, step: int, total: int, values: dict[str, float]) -> None: ...


def counted(trainer: Trainer) -> None:
    trainer.train_step()
    trainer.step += 1


def profile(step: Callable[[], Any], device: torch.device, rows: int = 20) -> str:
    """Where the time of five steps goes, by kernel or operator."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profiler(activities=activities) as found:
        for _ in range(5):
            step()
        synchronise(device)
    order = "self_cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return found.key_averages().table(sort_by=order, row_limit=rows, max_name_column_width=60)


def variants(config: Config, arguments: argparse.Namespace) -> dict[str, Config]:
    """What of ours is measured besides the first cache, by the names of the rows."""
    found = {}
    for cache in arguments.cache[1:]:
        found[f"ours, frames: {cache}"] = replace(config, loader=replace(config.loader, cache=cache))
    for kept in arguments.kept_patches:
        method = lewm_of(config)
        method = replace(method, encoder=replace(method.encoder, kept_patches=kept))
        found[f"ours, {kept} patches kept"] = replace(config, method=method)
    return found


def our_rows(config: Config, arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """Steps as a run takes them, and variants."""
    for name, settings in ({OURS: config} | variants(config, arguments)).items():
        forget_memory(device)
        started = time.perf_counter()
        out = Path(config.out or "") / name
        with prepared(replace(settings, out=out), "never", SINGLE, device, Notes()) as trainer:
            trainer.state.method.train()
            print(f"{name}: ready after {time.perf_counter() - started:.1f} s.", flush=True)
            row = measure(functools.partial(counted, trainer), arguments.steps, device)
            if "in cuda" in trainer.data.cache:
                store = EpisodeStore(config.data)  # type: ignore[arg-type]
                row["gib"] -= store.num_frames * store.resolution**2 * 3 / 2**30  # the frames themselves
            yield name, row
            if arguments.profile and name == OURS:
                print(profile(functools.partial(counted, trainer), device))
        del trainer  # and with it the captured step, which holds much memory


def public_rows(config: Config, arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    forget_memory(device)
    step = PublicStep(config, device)
    windows = hdf5_windows(config)
    batch = default_collate([windows[index] for index in range(config.train.batch_size)])
    pixels, actions = (tensor.to(device) for tensor in batch)
    yield "public, batch on the device", measure(lambda: step(pixels, actions), arguments.steps, device)
    batches = hdf5_batches(config, arguments.workers, device.type == "cuda")
    steps = min(arguments.steps, LOADER_STEPS)
    yield "public, HDF5 loader", measure(lambda: step(*next(batches)), steps, device)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--size", choices=SIZES, default=None, help="full on CUDA, else compact; toy: a try")
    parser.add_argument("--steps", type=int, default=None, help="measured steps; 100 on CUDA, else 10")
    parser.add_argument("--batch-size", type=int, default=None)
    parser.add_argument("--episodes", type=int, default=40)
    parser.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1), help="of the public loader")
    parser.add_argument("--compile", default="auto", choices=("auto", "on", "off"))
    parser.add_argument("--cache", nargs="+", default=["auto"], help="loader.cache; the public recipe meets the first")
    parser.add_argument("--kept-patches", nargs="*", type=int, default=[], help="ours with so many patches of a frame")
    parser.add_argument("--optimizer", default="adamw", choices=("adamw", "muon"))
    parser.add_argument("--no-cuda-graph", action="store_true")
    parser.add_argument("--no-fused", action="store_true", help="the encoder without kernels of our own")
    parser.add_argument("--no-public", action="store_true", help="measure ours only")
    parser.add_argument("--profile", action="store_true", help="print where our time goes")
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    on_gpu = arguments.device.startswith("cuda")
    arguments.size = arguments.size or ("full" if on_gpu else "compact")
    arguments.steps = arguments.steps or (100 if on_gpu else 10)
    return arguments


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        config = benchmark_config(arguments.size, arguments.device, Path(folder), arguments.batch_size)
        fast = {"compile": arguments.compile, "optimizer": arguments.optimizer}
        train = replace(config.train, **fast, cuda_graph=not arguments.no_cuda_graph, fused=not arguments.no_fused)
        config = replace(config, train=train, loader=replace(config.loader, cache=arguments.cache[0]))
        size = config.method.inputs().image_size or 0
        collect(config.env, folder / Path("data.h5"), CollectConfig(arguments.episodes, size))
        public = iter(()) if arguments.no_public else public_rows(config, arguments, device)
        rows = {}
        for name, row in itertools.chain(our_rows(config, arguments, device), public):
            # At once: what stops a long comparison shall not cost the rest of it.
            print(f"-> {name}: {row['ms']:.1f} ms, {row['gib']:.2f} GiB", flush=True)
            rows[name] = row
    images, flops = config.train.batch_size * (lewm_of(config).history + 1), step_flops(config)
    print(f"\n{arguments.size} model, batch {config.train.batch_size}, {flops / 1e12:.2f} TFLOP a step, {device}")
    print(f"{'':30s}{'ms/step':>10s}{'images/s':>10s}{'TFLOP/s':>9s}{'of 989':>8s}{'GiB':>7s}{'ratio':>7s}")
    ours = rows[OURS]["ms"]
    for name, row in rows.items():
        row |= {"images_per_s": 1000 * images / row["ms"], "tflops": flops / row["ms"] / 1e9, "ratio": row["ms"] / ours}
        share = 100 * row["tflops"] * 1e12 / H200_BF16
        print(
            f"{name:30s}{row['ms']:10.1f}{row['images_per_s']:10.0f}{row['tflops']:9.2f}{share:7.1f}%"
            f"{row['gib']:7.2f}{row['ratio']:7.2f}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps({"size": arguments.size, "device": str(device), "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
