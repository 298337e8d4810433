"""Human demonstrations of Push-T, from a file or from the Hugging Face hub, for experts to replay.

A source is the path of an .npz file with arrays

    state         (N, 5)   agent x, y, block x, y, block angle (radians), in the 512 px world
    action        (N, 2)   the absolute place that the agent is drawn to
    episode_ends  (E,)     one past the last row of each episode

or a dataset in LeRobot's format, a folder or a name on the hub. Its ``observation.state`` has the same five numbers, or
the agent's two beside the block's eight corner points in ``observation.environment_state``
(`lerobot/pusht_keypoints`).
"""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lewm.errors import DataError
from lewm.types import Array, Demonstration

HELD_OUT_EVERY = 10  # one demonstration of so many is kept for evaluation
STATE_SIZE, ACTION_SIZE = 5, 2
# What NumPy, zipfile and zlib say of a damaged .npz file.
NPZ_ERRORS = (OSError, ValueError, EOFError, KeyError, RuntimeError, MemoryError, zlib.error, zipfile.BadZipFile)
AGENT, BLOCK = "observation.state", "observation.environment_state"


def load_demonstrations(source: str) -> list[Demonstration]:
    """Every demonstration of a source, checked: finite numbers, at least two rows each."""
    path = locate_demonstrations(source)
    states, actions, ends = _read_lerobot(path) if path.is_dir() else _read_npz(path)
    for name, array, size in (("state", states, STATE_SIZE), ("action", actions, ACTION_SIZE)):
        if array.ndim != 2 or array.shape != (len(states), size) or array.dtype.kind not in "fiu":
            got = f"{array.dtype} {array.shape}"
            raise DataError(f"{source}: {name} must be numbers of shape ({len(states)}, {size}), got {got}. Repair it.")
        if not np.isfinite(array).all():
            row = int(np.argmin(np.isfinite(array).all(axis=1)))
            raise DataError(f"{source}: {name} must be finite, but row {row} is {array[row]}. Repair it, or drop it.")
    starts = _checked_starts(source, ends, len(states))
    return [
        Demonstration(states[start:end].astype(np.float64), actions[start:end].astype(np.float64))
        for start, end in zip(starts, ends, strict=True)
    ]


def locate_demonstrations(source: str) -> Path:
    """Where a source is on this machine: a file or a folder. A name on the hub is fetched, without its videos."""
    path = Path(source)
    if path.is_file() or _is_lerobot(path):
        return path
    if path.exists() or path.suffix or path.is_absolute() or source.count("/") != 1 or source.startswith("."):
        kinds = "an .npz file, a LeRobot folder, or the name of a LeRobot dataset on the Hugging Face hub"
        raise DataError(f"There are no demonstrations at {source}. Give {kinds}.")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(source, repo_type="dataset", allow_patterns=["data/*", "meta/*"]))
    # Refused names, the hub's answers and its HTTP library's failures share no base class across versions.
    except Exception as error:
        problem = f"{source!r} is not a file here, and could not be fetched from the Hugging Face hub ({error})"
        raise DataError(f"{problem}. Check the name and the network, or give a file.") from error
    if not _is_lerobot(folder):
        raise DataError(f"{source} on the Hugging Face hub has no meta/info.json: it is no LeRobot dataset.")
    return folder


def _is_lerobot(path: Path) -> bool:
    return (path / "meta" / "info.json").is_file()


def demonstrations_digest(demonstrations: Sequence[Demonstration]) -> str:
    """SHA-256 of their content, however they were stored."""
    digest = hashlib.sha256()
    for demonstration in demonstrations:
        for array in (demonstration.states, demonstration.actions):
            digest.update(f"{array.shape}".encode() + array.astype("<f8").tobytes())
    return digest.hexdigest()


def choose_demonstration(
    demonstrations: Sequence[Demonstration], rng: np.random.Generator, held_out: bool
) -> Demonstration:
    """A random one of those kept for evaluation (every tenth), or of the others."""
    choices = [index for index in range(len(demonstrations)) if (index % HELD_OUT_EVERY == 0) == held_out]
    if not choices:
        raise DataError(f"Of {len(demonstrations)} demonstrations every tenth is held out: none is left. Give more.")
    return demonstrations[choices[int(rng.integers(len(choices)))]]


def _read_npz(path: Path) -> tuple[Array, Array, Array]:
    """States, actions, and one past the last row of each episode."""
    wanted = ("state", "action", "episode_ends")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.lib.npyio.NpzFile):
            with loaded:
                arrays = dict(loaded)
        else:  # a single, nameless array
            arrays = {}
    except NPZ_ERRORS as error:
        raise DataError(f"{path} is not a whole .npz file ({error}). Download or make it again.") from error
    missing = [name for name in wanted if name not in arrays]
    if missing:
        problem = f"needs the arrays {', '.join(wanted)}, but has {', '.join(arrays) or 'none'}"
        raise DataError(f"{path} {problem}. Add {', '.join(missing)}.")
    return arrays["state"], arrays["action"], arrays["episode_ends"]


def _read_lerobot(folder: Path) -> tuple[Array, Array, Array]:
    """States, actions, and one past the last row of each episode."""
    from lewm.data.formats.exchange import read_description
    from lewm.data.formats.lerobot import read_lerobot_columns  # here, as it loads what .npz files do not need

    try:
        features = read_description(folder / "meta" / "info.json", "Download it again.")["features"]
        sizes = {name: tuple(feature["shape"]) for name, feature in features.items()}
    except (AttributeError, KeyError, TypeError) as error:
        problem = f"must give the shape of every feature ({error!r})"
        raise DataError(f"{folder}: meta/info.json {problem}. Download it again.") from error
    if sizes.get("action") == (ACTION_SIZE,) and sizes.get(AGENT) == (STATE_SIZE,):
        columns, lengths, _ = read_lerobot_columns(folder, [AGENT, "action"])
        return columns[AGENT], columns["action"], np.cumsum(lengths)
    if sizes.get("action") == (ACTION_SIZE,) and sizes.get(AGENT) == (2,) and sizes.get(BLOCK) == (16,):
        columns, lengths, _ = read_lerobot_columns(folder, [AGENT, BLOCK, "action"])
        states = np.concatenate([columns[AGENT], _block_poses(columns[BLOCK])], axis=1)
        return states, columns["action"], np.cumsum(lengths)
    needed = f"action (2), and {AGENT} with 5 numbers or with 2 beside {BLOCK} with 16"
    found = ", ".join(f"{name} {size}" for name, size in sizes.items() if not name.startswith("next."))
    advice = "Without the block's pose no replay can start; lerobot/pusht_keypoints has it"
    raise DataError(f"{folder} lacks what a replay needs: {needed}. It has {found}. {advice}.")


def _block_poses(corner_points: Array) -> Array:
    """Poses (N, 3) of the T from its corners (N, 16): four of the bar, 120 × 30 px, then four of the stem, 30 × 90."""
    bar, stem = corner_points.reshape(-1, 2, 4, 2).astype(np.float64).mean(axis=2).swapaxes(0, 1)
    along = stem - bar  # from centre to centre, 60 px down the T; the origin lies 15 px up from the bar's centre
    return np.column_stack([bar - along / 4, np.arctan2(-along[:, 0], along[:, 1])])


def _checked_starts(source: str, ends: Array, rows: int) -> Array:
    """First rows of the episodes, int64 (E,), of which ``ends`` are one past the last."""
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends):
        raise DataError(f"{source}: episode_ends must be one integer per episode, got {ends.dtype} {ends.shape}.")
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    short = np.flatnonzero(ends.astype(np.int64) - starts < 2)
    if len(short):
        problem = f"episode {short[0]} spans rows {starts[short[0]]} to {ends[short[0]]}"
        raise DataError(f"{source}: every episode needs at least 2 rows, but {problem}. Repair episode_ends.")
    if ends[-1] != rows:
        raise DataError(f"{source}: the last of episode_ends must be the number of rows, {rows}, got {ends[-1]}.")
    return starts
