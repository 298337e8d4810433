"""What the readers and writers of every format share: episodes on their way, and outputs that appear whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lewm.data.store import Attributes, Columns
from lewm.errors import DataError
from lewm.types import Array

FitFrames = Callable[[Array], Array]  # frames (n, H, W, 3) -> (n, R, R, 3), both uint8


@dataclass(frozen=True)
class EpisodeSource:
    """Episodes from anywhere. ``episodes`` yields columns (L, ...), as ``write_episodes`` takes them, one at a time.

    attributes: what is known of all of them, as ``EpisodeStore.attributes``.
    """

    attributes: Attributes
    num_episodes: int
    episodes: Iterator[Columns]


@contextlib.contextmanager
def completing(path: Path) -> Iterator[Path]:
    """A temporary sibling of ``path``, for a file or a folder, that takes its name when the context ends well.

    Otherwise no trace of it stays, and what had the name before is as it was.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        temporary.replace(path)
    except OSError as error:
        raise DataError(f"{path} cannot be written ({error}). Make room, or choose another place.") from error
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):  # the first error is the one to report
                temporary.unlink(missing_ok=True)
