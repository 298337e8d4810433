"""`lewm data show`: one episode of a dataset as a film."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from lewm.data.store import EpisodeStore
from lewm.errors import DataError
from lewm.files import FILM, check_output, completing
from lewm.video import Mp4Writer, encode_gif

PALETTE_FRAMES = 8  # whose colours a GIF can show


def show(path: str | Path, episode: int, out: str | Path | None = None, fps: int = 10) -> Path:
    """Write the frames of an episode as a GIF or an MP4, by the suffix of ``out``; returns the file's path.

    out: None: a GIF beside the dataset.
    """
    path = Path(path)
    out = path.with_name(f"{path.stem}.episode{episode}.gif") if out is None else Path(out)
    check_output(out, FILM, [path])
    if not 1 <= fps <= 100:
        raise DataError(f"fps must be between 1 and 100, got {fps}.")
    with EpisodeStore(path) as store:
        if not 0 <= episode < store.num_episodes:
            raise DataError(f"{path} has episodes 0 to {store.num_episodes - 1}, not {episode}. Choose one of them.")
        rows = store.offsets[episode] + np.arange(store.lengths[episode])
        frames = store.read_frames(np.intersect1d(rows, store.frame_rows))
    if not len(frames):
        raise DataError(f"Episode {episode} of {path} is too short to have a frame. Choose another.")
    with completing(out) as temporary:
        if out.suffix.lower() == ".gif":
            pictures = [Image.fromarray(frame) for frame in frames]
            durations = [round(1000 / fps)] * len(pictures)
            temporary.write_bytes(encode_gif(pictures, durations, pictures[:: -(-len(pictures) // PALETTE_FRAMES)]))
        else:
            with Mp4Writer(temporary, fps, (store.resolution, store.resolution), "compact") as video:
                video.write(frames)
    return out
