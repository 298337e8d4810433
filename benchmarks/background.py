"""How many patches of a dataset's frames are not background: how large method.encoder.kept-patches has to be.

    lewm collect pusht --episodes 24 --frame-stride 25 --out data/few.h5
    python benchmarks/background.py --data data/few.h5 [--patch-size 14] [--threshold 1]

A patch counts if its pixels differ from the background's by more than the threshold, in grey levels, on average.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tyro

from lewm.data.stats import background, spread_frames
from lewm.data.store import EpisodeStore
from lewm.model.vit import changed_patches


def main(data: Path, patch_size: int = 14, frames: int = 200, threshold: float = 1.0) -> None:
    """Print the median, the 95th percentile and the largest number of patches over evenly spaced frames."""
    with EpisodeStore(data) as store:
        if store.resolution % patch_size:
            raise SystemExit(f"Frames of {store.resolution} pixels cannot be cut into patches of {patch_size}.")
        episodes = np.arange(store.num_episodes)
        chosen, empty = spread_frames(store, episodes, frames), background(store, episodes)
    counts = changed_patches(chosen, empty, patch_size, threshold)
    middle, most, largest = np.median(counts), np.percentile(counts, 95), counts.max()
    print(f"{data}: {len(chosen)} frames of {(empty.shape[0] // patch_size) ** 2} patches")
    print(f"not background: {middle:.0f} (median), {most:.0f} (95th percentile), {largest} (at most)")


if __name__ == "__main__":
    tyro.cli(main)
