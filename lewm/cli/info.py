"""`lewm info`: what a checkpoint, a run or a dataset holds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.markup import escape

from lewm.cli.frame import parse, print_grid
from lewm.types import ActionStats


@dataclass(frozen=True)
class InfoArgs:
    """Say what a checkpoint, a run or a dataset holds."""

    path: tyro.conf.Positional[str]  # A model folder, a run folder, a model's name, a hub id or a dataset file.


def run(arguments: list[str]) -> None:
    """Print names and values."""
    args = parse(InfoArgs, arguments, "info")
    is_dataset = args.path.endswith((".h5", ".hdf5")) or Path(args.path).is_file()
    rows = dataset(Path(args.path)) if is_dataset else model(args.path)
    print_grid((f"[bold]{name}[/]", escape(value)) for name, value in rows.items())


def model(source: str) -> dict[str, str]:
    """A checkpoint, loaded to make sure that it can be."""
    from lewm import checkpoint
    from lewm.methods.files import load

    folder = checkpoint.resolve(source)
    document = checkpoint.load_document(folder)
    loaded = load(folder, device="cpu")
    facts, inputs = loaded.facts, loaded.inputs
    size = (folder / checkpoint.WEIGHTS).stat().st_size
    rows = {
        "checkpoint": str(folder),
        "method": loaded.settings.NAME,
        "written by": f"lewm {document['lewm_version']}, format {document['format_version']}",
        "parameters": f"{sum(p.numel() for p in loaded.parameters()):,}",
        "weights": f"{checkpoint.weights_precision(folder)}, {size / 1e6:.1f} MB",
        **loaded.settings.rows(),
        "actions": f"{inputs.action_dim} numbers, blocks of {inputs.frame_skip}; {_stats(facts.actions)}",
        "environment": facts.environment or "not recorded",
    }
    if facts.digest:
        rows["dataset"] = f"{facts.episodes:,} episodes, digest {facts.digest[:12]}"
    if loaded.recorded_actions is not None:
        count, steps, _ = loaded.recorded_actions.shape
        rows["recorded actions"] = f"{count:,} sequences of {steps}"
    if training := document.get("training"):
        rows["training"] = f"{training['step']} steps on {training['windows']} windows of {training['env']}"
    return rows


def dataset(path: Path) -> dict[str, str]:
    """A dataset, opened with all its checks."""
    from lewm.data.proprio import PROPRIO, describe_proprio
    from lewm.data.stats import action_stats
    from lewm.data.store import EpisodeStore

    with EpisodeStore(path) as store:
        lengths = store.lengths
        rows = {
            "dataset": f"{path} ({path.stat().st_size / 2**20:.1f} MiB)",
            "environment": store.environment or "not recorded",
            "episodes": f"{len(lengths)}, of {lengths.min()} to {lengths.max()} steps (mean {lengths.mean():.1f})",
            "rows": f"{store.num_rows:,}",
            "frames": f"{store.num_frames:,} of {store.resolution} px",
            "actions": f"{store.action_dim} numbers; {_stats(action_stats(store.actions))}",
            PROPRIO: describe_proprio(store),
        }
        others = {name: value for name, value in store.attributes.items() if name not in rows and value != ""}
        rows |= {str(name): str(value) for name, value in others.items()}
    return rows


def _stats(stats: ActionStats | None) -> str:
    if stats is None:
        return "no statistics (cannot plan)"
    mean, std = (", ".join(f"{value:.3f}" for value in values) for values in (stats.mean, stats.std))
    return f"mean ({mean}), std ({std})"
