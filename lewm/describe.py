"""What `lewm info` says about a file: names and values, ready to print."""

from __future__ import annotations

from pathlib import Path

from lewm import checkpoint
from lewm.data.stats import action_stats
from lewm.data.store import EpisodeStore
from lewm.model.world_model import LeWM
from lewm.types import ActionStats


def model(source: str) -> dict[str, str]:
    """A checkpoint, loaded to make sure that it can be."""
    folder = checkpoint.resolve(source)
    document = checkpoint.load_document(folder)
    loaded = LeWM.from_pretrained(folder, device="cpu")
    config, vit = loaded.config, loaded.config.encoder
    size = (folder / checkpoint.WEIGHTS).stat().st_size
    rows = {
        "checkpoint": str(folder),
        "written by": f"lewm {document['lewm_version']}, format {document['format_version']}",
        "parameters": f"{sum(p.numel() for p in loaded.parameters()):,}",
        "weights": f"{checkpoint.weights_precision(folder)}, {size / 1e6:.1f} MB",
        "encoder": f"{vit.title}: {vit.depth} layers of width {vit.width}",
        "predictor": f"{config.predictor.depth} layers, embedding of {config.embed_dim}, history {config.history}",
        "actions": f"{config.action_dim} numbers, blocks of {config.frame_skip}; {_stats(loaded.action_stats)}",
    }
    if loaded.recorded_actions is not None:
        count, steps, _ = loaded.recorded_actions.shape
        rows["recorded actions"] = f"{count:,} sequences of {steps}"
    if training := document.get("training"):
        rows["training"] = f"{training['step']} steps on {training['windows']} windows of {training['env']}"
    return rows


def dataset(path: Path) -> dict[str, str]:
    """A dataset, opened with all its checks."""
    with EpisodeStore(path) as store:
        lengths = store.lengths
        rows = {
            "dataset": f"{path} ({path.stat().st_size / 2**20:.1f} MiB)",
            "environment": store.environment or "not recorded",
            "episodes": f"{len(lengths)}, of {lengths.min()} to {lengths.max()} steps (mean {lengths.mean():.1f})",
            "rows": f"{store.num_rows:,}",
            "frames": f"{store.num_frames:,} of {store.resolution} px",
            "actions": f"{store.action_dim} numbers; {_stats(action_stats(store.actions))}",
        }
        others = {name: value for name, value in store.attributes.items() if name != "environment" and value != ""}
        rows |= {str(name): str(value) for name, value in others.items()}
    return rows


def _stats(stats: ActionStats | None) -> str:
    if stats is None:
        return "no statistics (cannot plan)"
    mean, std = (", ".join(f"{value:.3f}" for value in values) for values in (stats.mean, stats.std))
    return f"mean ({mean}), std ({std})"
