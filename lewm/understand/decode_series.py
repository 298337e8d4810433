"""What embeddings show over training: a decoder for each checkpoint of a run, drawing the same held-out frames.

No decoder can draw for two checkpoints: what embeddings mean changes as long as the encoder learns. So each is trained
anew, with the same settings, on the same frames.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure

from lewm import checkpoint
from lewm.checked import to_dict
from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.types import Array, ProgressCallback
from lewm.understand.decoder import DecoderSettings, held_out, train_decoder
from lewm.understand.figures import styled
from lewm.understand.films import show_grid, strips_figure
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.likeness import decibels, place_errors
from lewm.understand.places import DETECTORS, UNIT
from lewm.understand.subject import Subject, open_subject, question

VERB = "decode_series"
SMALL = "series"  # the folder of a run's small checkpoints
MEASURED, SHOWN = 200, 8  # frames


def checkpoints_of(run: Path) -> list[Path]:
    """A run's checkpoints, small ones that it kept on request and those that it continues from, oldest first."""
    folders = {
        checkpoint.step_of(each): each for name in ("checkpoints", SMALL) for each in checkpoint.of_run(run / name)
    }
    if not folders:
        raise ConfigError(f"{run} holds no checkpoints of a run. Name the folder that `lewm train --out` wrote.")
    return [folder for _, folder in sorted(folders.items(), key=lambda item: item[0] or 0)]


def decode_series(
    run: Path,
    store: EpisodeStore,
    out: Path,
    settings: DecoderSettings,
    device: str | torch.device = "auto",
    on_progress: Callable[[str], ProgressCallback] | None = None,
) -> Findings:
    """Train a decoder for each checkpoint of a run, in OUT/series, and show what they draw of the same frames.

    on_progress: given a checkpoint's name, returns what counts the steps of its decoder.
    """
    subjects = [open_subject(folder, device) for folder in checkpoints_of(run)]
    whose = {"checkpoints": [subject.digest for subject in subjects], "decoder": to_dict(settings)}
    asked = question(VERB, subjects[-1], store, whose)
    if found := read_findings(out, VERB, asked):
        return found
    real = _held_out_frames(store)
    steps, rows, drawings = list[int](), list[dict[str, Any]](), list[Array]()
    for subject in subjects:
        name = Path(subject.source).name
        place = out / SMALL / f"{name}.safetensors"
        progress = on_progress(name) if on_progress else None
        decoder = train_decoder(subject, store, settings, place, progress).decoder
        frames = torch.from_numpy(real).to(subject.device)
        drawn = decoder.frames(torch.cat([subject.encoder(part) for part in frames.split(64)])).cpu().numpy()
        steps.append(checkpoint.step_of(Path(subject.source)) or 0)
        rows.append(_measured(subject, real, drawn))
        drawings.append(drawn[_shown(len(real))])
    name = f"{run.resolve().name} ({subjects[-1].model.settings.NAME})"
    findings = _findings(name, asked, steps, rows, settings)
    pictures = np.stack([*drawings, real[_shown(len(real))]])
    write_findings(out, findings, functools.partial(draw, frames=pictures))
    return findings


def _held_out_frames(store: EpisodeStore) -> Array:
    """Frames that no decoder learns from, evenly spaced: uint8 (N, R, R, 3)."""
    _, ids = held_out(store)
    episode = np.repeat(np.arange(store.num_episodes), store.lengths)[store.frame_rows]
    rows = store.frame_rows[np.isin(episode, ids)]
    return store.read_frames(rows[np.linspace(0, len(rows) - 1, min(MEASURED, len(rows))).astype(np.int64)])


def _shown(count: int) -> Array:
    return np.linspace(0, count - 1, min(SHOWN, count)).astype(np.int64)


def _measured(subject: Subject, real: Array, drawn: Array) -> dict[str, Any]:
    detector = DETECTORS.get(subject.world.name) if subject.world else None
    place = place_errors(detector, drawn[:, None], real[:, None])[0] if detector else None
    return {"decibels": decibels(drawn[:, None], real[:, None])[0], "place": place}


def _findings(
    name: str, asked: dict[str, Any], steps: list[int], rows: list[dict[str, Any]], settings: DecoderSettings
) -> Findings:
    header: tuple[str, ...] = ("training step", "reconstructed, dB")
    found = any(row["place"] for row in rows)
    if found:
        header += (f"place, median px of {UNIT}", "90 %")
    cells = [(str(step), *_cells(row, found)) for step, row in zip(steps, rows, strict=True)]
    sentences = (
        f"Each checkpoint has a decoder of its own, trained for {settings.steps:,} steps on the same frozen frames.",
        f"Measured on up to {MEASURED} frames of episodes that no decoder has seen; pixels that differ from the "
        f"background weigh {settings.foreground:g} times as much as others in training.",
    )
    numbers = {"steps": steps, "rows": rows}
    title = f"What {name} shows over training"
    return Findings(VERB, title, asked, (Table("By checkpoint", header, tuple(cells)),), sentences, numbers, {})


def _cells(row: dict[str, Any], places: bool) -> Iterator[str]:
    yield f"{row['decibels']:.1f}"
    if places:
        yield from (NONE if (value := row["place"][name]) is None else f"{value:.2f}" for name in ("median", "p90"))


@styled
def draw(findings: Findings, frames: Array) -> Figure:
    """Drawn frames (checkpoints + 1, frames, R, R, 3), a row for each checkpoint; the last row is real."""
    rows = (*(f"step {step:,}" for step in findings.numbers["steps"]), "real")
    width = 1.2 + 0.85 * frames.shape[1]
    figure, (axes,) = strips_figure(width, [0.35 + 0.85 * len(rows)])
    show_grid(axes, frames, [""] * frames.shape[1], rows)
    axes.set_title(findings.title, loc="left")
    return figure
