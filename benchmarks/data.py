"""Data: how fast episodes are collected, how large they are, and how fast training windows are read from them.

    python benchmarks/data.py [--demos PATH] [--episodes 64] [--workers N] [--json FILE]

First collects each environment at 224 px: frames per second of all workers together, gigabytes per million frames.
Then reads random samples (4 frames of 224 px, 5 rows apart, and 20 actions, in batches of 128) of the last file, from
the page cache: with our reader, with plain `h5py` slicing, and with the HDF5 reader of the public package
(`pip install --no-deps stable-worldmodel`), the latter two also in as many processes as ours has threads. Rounds of all
readers alternate, and the best round counts: a machine that does other things beside only ever slows one down.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import peer
import torch
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.data.frames import open_frames
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows
from lewm.types import Inputs

HISTORY, SKIP, BATCH, ROUNDS = 3, 5, 128, 3
READ_SECONDS = 1.0  # of every reader in every round

Reader = Callable[[np.ndarray], Any]  # first rows of a batch of samples -> the samples


def collection_rates(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Collect every environment that is asked for; one row of results for each."""
    rows = []
    for name in args.envs:
        demos = args.demos if name == "pusht" else None
        started = time.perf_counter()
        report = collect(name, folder / f"{name}.h5", CollectConfig(args.episodes, workers=args.workers, demos=demos))
        seconds = time.perf_counter() - started
        row = {"environment": name, "episodes": report.episodes, "reached the goal": report.successes}
        row |= {"frames": report.frames, "frames/s": report.frames / seconds}
        rows.append(row | {"GB per million": report.gb_per_million_frames})
    return rows


class Slices(TorchDataset[dict[str, torch.Tensor]]):
    """Plain `h5py` at its best: one slice per frame; one with a stride takes 50 times as long. Index: first row."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file: h5py.File | None = None

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        self.file = self.file or h5py.File(self.path, "r")  # anew in every process
        end = row + (HISTORY + 1) * SKIP
        pixels = np.stack([self.file["pixels"][frame] for frame in range(row, end, SKIP)])
        return {"pixels": torch.from_numpy(pixels), "action": torch.from_numpy(self.file["action"][row:end])}


def public_dataset(path: Path) -> Any:
    """The public package's reader, with what it needs here and without what it would install."""
    unused = types.ModuleType("stable_worldmodel.data.utils")  # only looks up where downloads are kept
    unused.get_cache_dir = None  # type: ignore[attr-defined]
    sys.modules.setdefault("hdf5plugin", types.ModuleType("hdf5plugin"))  # other compressions than this file's
    peer.load("data.dataset")
    sys.modules[unused.__name__] = unused
    reader = peer.load("data.formats.hdf5").HDF5Dataset
    return reader(path=path, frameskip=SKIP, num_steps=HISTORY + 1, keys_to_load=["pixels", "action"])


def in_process(dataset: Any, position: dict[int, int]) -> Reader:
    def read(starts: np.ndarray) -> Any:
        return torch.utils.data.default_collate([dataset[position.get(row, row)] for row in starts.tolist()])

    return read


def in_processes(dataset: Any, position: dict[int, int], processes: int) -> Callable[[np.ndarray], float]:
    """Seconds that the batches of ``starts`` take through a DataLoader whose processes are running already."""

    def seconds(starts: np.ndarray) -> float:
        batches = [[position.get(row, row) for row in batch] for batch in starts.reshape(-1, BATCH).tolist()]
        loader = DataLoader(dataset, batch_sampler=[*batches[:processes], *batches], num_workers=processes)
        iterator = iter(loader)
        for _ in range(processes):  # their start is not part of reading
            next(iterator)
        started = time.perf_counter()
        for _ in iterator:
            pass
        return time.perf_counter() - started

    return seconds


def reading_rates(path: Path, threads: int) -> dict[str, float]:
    """Samples per second of every reader."""
    store = EpisodeStore(path)
    inputs = Inputs(HISTORY + 1, SKIP, store.action_dim, store.resolution)
    windows = Windows(store, open_frames(store, "disk", threads), np.arange(store.num_episodes), inputs)
    first_rows = windows.rows(np.arange(len(windows)))[:, 0, 0]
    index = {int(row): i for i, row in enumerate(first_rows)}
    # A copy, as one process cannot open a file both in HDF5's way for concurrent writers, as this reader does, and not.
    copy = Path(shutil.copy(path, path.with_suffix(".copy.h5")))
    readers: dict[str, Reader] = {
        f"lewm, {threads} threads": lambda starts: windows.batch(np.array([index[row] for row in starts.tolist()])),
        "h5py slicing": in_process(Slices(path), {}),
        "stable-worldmodel": in_process(public_dataset(copy), index),
    }
    loaders = {
        f"h5py slicing, {threads} processes": in_processes(Slices(path), {}, threads),
        f"stable-worldmodel, {threads} processes": in_processes(public_dataset(copy), index, threads),
    }
    check_agreement(first_rows[:: max(len(first_rows) // 8, 1)], readers)
    rng, best = np.random.default_rng(0), dict.fromkeys([*readers, *loaders], 0.0)
    for _ in range(ROUNDS):
        for name, read in readers.items():
            samples, started = 0, time.perf_counter()
            while time.perf_counter() < started + READ_SECONDS:
                read(rng.choice(first_rows, BATCH))
                samples += BATCH
            best[name] = max(best[name], samples / (time.perf_counter() - started))
        for name, seconds in loaders.items():
            starts = rng.choice(first_rows, BATCH * 2 * threads)
            best[name] = max(best[name], len(starts) / seconds(starts))
    return best


def check_agreement(starts: np.ndarray, readers: dict[str, Reader]) -> None:
    """All readers must give the same frames and, where one was taken, the same actions."""
    ours, *others = [read(starts) for read in readers.values()]
    for other in others:
        channels_last = other["pixels"].shape[-1] == 3
        pixels = other["pixels"] if channels_last else other["pixels"].permute(0, 1, 3, 4, 2)
        assert torch.equal(ours.pixels, pixels)
        assert torch.equal(ours.actions.flatten(), torch.nan_to_num(other["action"]).flatten())


def print_table(rows: list[dict[str, Any]]) -> None:
    cells = [[str(name) for name in rows[0]]]
    cells += [[f"{x:,.2f}" if isinstance(x, float) and x < 100 else x if isinstance(x, str) else f"{x:,.0f}"
               for x in row.values()] for row in rows]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", nargs="+", default=["tworoom", "pusht"], help="the last one's file is read")
    parser.add_argument("--demos", help="demonstrations for pusht; else its scripted expert collects")
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that collect")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that read")
    parser.add_argument("--json", type=Path, help="where to write the numbers as well")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        collected = collection_rates(Path(folder), args)
        print_table(collected)
        rates = reading_rates(Path(folder) / f"{args.envs[-1]}.h5", args.threads)
    ours = next(iter(rates.values()))
    read = [{"reader": name, "samples/s": rate, "lewm is faster by": ours / rate} for name, rate in rates.items()]
    print_table(read)
    if args.json:
        args.json.write_text(json.dumps({"collecting": collected, "reading": read}, indent=1))


if __name__ == "__main__":
    main()
