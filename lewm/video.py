"""Moving pictures as files: GIFs with Pillow, MP4s with PyAV, which the pip extra ``lerobot`` brings."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from lewm.errors import DataError
from lewm.extras import import_extra
from lewm.types import Array

# lossless: every pixel comes back; PyAV and FFmpeg decode it, browsers do not. compact: plays everywhere.
VideoQuality = Literal["lossless", "compact"]
KEYFRAME_INTERVAL = 10  # frames between those that need no others: what a reader decodes in vain when it seeks


def encode_gif(pictures: Sequence[Image.Image], durations: Sequence[int], colours_of: Sequence[Image.Image]) -> bytes:
    """Encode pictures of one size as an endless GIF, each shown for its duration in milliseconds.

    One palette, of the colours in ``colours_of``, serves them all: nothing flickers, and only what moved is stored.
    """
    sample = Image.fromarray(np.concatenate([np.asarray(picture) for picture in colours_of]))
    palette = sample.quantize(256, dither=Image.Dither.NONE)
    first, *rest = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    buffer = io.BytesIO()
    first.save(buffer, "GIF", save_all=True, append_images=rest, duration=list(durations), loop=0)
    return buffer.getvalue()


def import_lerobot_extra(module: str) -> Any:
    """A module that the pip extra ``lerobot`` installs, or an error that names the extra."""
    return import_extra(module, "lerobot", "MP4 and LeRobot files need", DataError)


class Mp4Writer(contextlib.AbstractContextManager["Mp4Writer"]):
    """An H.264 file that grows by frames, uint8 (n, H, W, 3), with (H, W) = ``size``.

    Frame i is shown at i / fps seconds. ``codec`` and ``pixel_format`` are FFmpeg's names of how it is encoded.
    """

    codec = "h264"

    def __init__(self, path: Path, fps: int, size: tuple[int, int], quality: VideoQuality) -> None:
        av = import_lerobot_extra("av")
        height, width = size
        # Chroma of half the resolution, which every player knows, needs even sides.
        subsampled = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        encoder, self.pixel_format, crf = {
            "lossless": ("libx264rgb", "rgb24", "0"),
            "compact": ("libx264", subsampled, "18"),
        }[quality]
        self._make_frame = av.VideoFrame.from_ndarray
        self._container = av.open(str(path), "w", format="mp4")
        self._stream = self._container.add_stream(encoder, rate=fps)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, self.pixel_format
        self._stream.options = {"crf": crf, "g": str(KEYFRAME_INTERVAL)}

    def write(self, frames: Array) -> None:
        """Append frames, uint8 (n, H, W, 3)."""
        for frame in frames:
            self._container.mux(self._stream.encode(self._make_frame(np.ascontiguousarray(frame), format="rgb24")))

    def __exit__(self, kind: object, *_error: object) -> None:
        try:
            if kind is None:
                self._container.mux(self._stream.encode(None))
        finally:
            self._container.close()


class Mp4Reader(contextlib.AbstractContextManager["Mp4Reader"]):
    """A video file, read at given times."""

    def __init__(self, path: Path) -> None:
        self.path, self._av = path, import_lerobot_extra("av")
        with self._decoding():
            self._container = self._av.open(str(path))
            self._stream = self._container.streams.video[0]

    def __exit__(self, *_error: object) -> None:
        self._container.close()

    def read(self, times: Array, tolerance: float) -> Iterator[Array]:
        """Frames, uint8 (H, W, 3), at ascending ``times`` in seconds, each at most ``tolerance`` away from its time."""
        with self._decoding():
            self._container.seek(max(int(times[0] / self._stream.time_base), 0), stream=self._stream)
            decoded = self._container.decode(self._stream)
            for time in times:
                frame = next((f for f in decoded if f.time is not None and f.time >= time - tolerance), None)
                if frame is None or frame.time > time + tolerance:
                    came = "the video ends before it" if frame is None else f"the next is at {frame.time:.3f} s"
                    raise DataError(f"{self.path} has no frame at {time:.3f} s: {came}. Download or make it again.")
                yield frame.to_ndarray(format="rgb24")

    @contextlib.contextmanager
    def _decoding(self) -> Iterator[None]:
        try:
            yield
        except (self._av.FFmpegError, IndexError) as error:
            raise DataError(f"{self.path} cannot be decoded ({error}). Download or make it again.") from error
