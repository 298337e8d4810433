"""`decode`: what embeddings and imagined futures look like, and how far imagination is from what happened.

A model sees ``history`` real frames (three, as in the paper) and imagines the rest of a window open loop, under the
actions that were recorded. Both the real and the imagined embeddings are drawn by a decoder that learned from frozen
embeddings; all numbers are of episodes that the decoder has not seen.

Shapes: N windows, T frames of a window, H blocks imagined, D embedding.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from matplotlib.figure import Figure

from lewm.checked import Checked, to_dict
from lewm.data.store import EpisodeStore
from lewm.data.windows import Windows
from lewm.errors import ConfigError, DataError
from lewm.evaluate.comparison_tables import NONE, Table
from lewm.model.decoder import FOREGROUND_LEVELS
from lewm.rng import stream
from lewm.types import Array, Inputs, ProgressCallback
from lewm.understand.decoder import Drawer, check_embedding, decoder_place, held_out, load_decoder, own_decoder
from lewm.understand.episodes import another_kind
from lewm.understand.figures import COLOURS, FAINT, GREY, styled
from lewm.understand.films import Strip, show_strip, strips_figure, write_film
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.likeness import decibels, place_errors
from lewm.understand.looking import ALL_SAME
from lewm.understand.places import DETECTORS, UNIT, Detector
from lewm.understand.subject import Subject, question

VERB = "decode"
FILM = "decode.gif"
WINDOWS, ENCODED_WINDOWS = 1, 8  # what a random stream is for; windows that are looked at together


@dataclass(frozen=True)
class DecodeSettings(Checked):
    """What is imagined and shown."""

    SECTION: ClassVar[str] = "decode"

    blocks: int = 8  # Action blocks to imagine, fewer if episodes are too short.
    windows: int = 200  # Windows of held-out episodes to measure on.
    shown: int = 3  # Of them, how many the strip and the film show.
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("blocks", "windows", "shown", most=10_000)
        self._require(self.seed >= 0, "seed", "at least 0")


@dataclass(frozen=True)
class _Futures:
    """Windows as they were, and as they were imagined from their first frames.

    frames: uint8 (N, T, R, R, 3).  z, imagined: their embeddings (N, T, D), and predicted ones (N, H, D).
    drawn: from both, one after the other, uint8 (N, T + H, R, R, 3).  All on the CPU.
    """

    frames: torch.Tensor
    z: torch.Tensor
    imagined: torch.Tensor
    drawn: torch.Tensor

    @property
    def seen(self) -> int:
        return self.z.shape[1] - self.imagined.shape[1]


# -- for the report --------------------------------------------------------------------------------------------------


def fits(subject: Subject) -> str | None:
    """Why a model cannot be decoded; None: it can, once it has a decoder."""
    if not hasattr(subject.model, "rollout"):
        return f"the method {subject.model.settings.NAME!r} imagines no futures"
    return check_embedding(subject)


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """What a report shows, with the decoder that is among the findings in ``out``; a missing one is an error."""
    settings = DecodeSettings(windows=50 if quick else DecodeSettings.windows, seed=seed)
    return decode(subject, store, out, find_drawer(subject, out), settings, on_progress)


def find_drawer(subject: Subject, out: Path, path: Path | None = None) -> Drawer:
    """The decoder in a file, else that among the findings, else the one that the model was trained with."""
    place = path or decoder_place(out)
    if path is None and not place.is_file() and (own := own_decoder(subject)):
        return own
    return load_decoder(place, subject)


# -- the question ----------------------------------------------------------------------------------------------------


def decode(
    subject: Subject,
    store: EpisodeStore,
    out: Path,
    drawer: Drawer,
    settings: DecodeSettings,
    on_progress: ProgressCallback | None = None,
) -> Findings:
    """Measure and show reconstructions and imagined futures; writes findings, figure and film into ``out``.

    The same question answered before is not asked again.
    """
    if reason := fits(subject):
        raise ConfigError(f"{subject.source} cannot be decoded: {reason}.")
    asked = question(VERB, subject, store, to_dict(settings) | {"decoder": drawer.about.get("weights", "own")})
    if found := read_findings(out, VERB, asked):
        return found
    futures, settings = _imagine(subject, store, drawer, settings, on_progress)
    real, drawn = futures.frames.numpy(), futures.drawn.numpy()
    reconstructed, imagined = drawn[:, : real.shape[1]], drawn[:, real.shape[1] :]
    strips = _strips(real, reconstructed, imagined, futures.seen, settings.shown)
    detector = DETECTORS.get(subject.world.name) if subject.world else None
    behind = drawer.decoder.background.cpu().numpy()
    numbers = _measure(futures, real, reconstructed, imagined, behind, detector)
    findings = _findings(subject, asked, numbers, drawer, settings, detector)
    if kind := another_kind(subject, store):
        findings = replace(findings, sentences=(*findings.sentences, kind))
    write_film(out / FILM, strips)
    write_findings(out, findings, functools.partial(draw, strips=strips[:2]))
    return findings


def _imagine(
    subject: Subject,
    store: EpisodeStore,
    drawer: Drawer,
    settings: DecodeSettings,
    on_progress: ProgressCallback | None,
) -> tuple[_Futures, DecodeSettings]:
    """Embed windows of held-out episodes, imagine and draw; with the settings as the data allows them."""
    model, (_, ids) = subject.model, held_out(store)
    seen, skip = model.history, model.frame_skip
    longest = int(store.lengths[ids].max()) // skip - seen
    if longest < 1:
        need = f"{seen} frames and one after them, {skip} rows apart"
        raise DataError(f"{store.path}: no held-out episode has {need}. Collect longer ones.")
    settings = replace(settings, blocks=min(settings.blocks, longest))
    inputs = Inputs(seen + settings.blocks, skip, model.action_dim)
    windows = Windows(store, None, ids, inputs)
    order = stream(settings.seed, WINDOWS).permutation(len(windows))[: settings.windows]
    parts = []
    for start in range(0, len(order), ENCODED_WINDOWS):
        if on_progress:
            on_progress(start, len(order))
        frames, z, imagined = _future(subject, store, windows, order[start : start + ENCODED_WINDOWS], seen)
        drawn = drawer.decoder.frames(torch.cat([z, imagined], dim=1))
        parts.append((frames, z.cpu(), imagined.cpu(), drawn.cpu()))
    if on_progress:
        on_progress(len(order), len(order))
    return _Futures(*map(torch.cat, zip(*parts, strict=True))), replace(settings, windows=len(order))


@torch.no_grad()
def _future(
    subject: Subject, store: EpisodeStore, windows: Windows, chosen: Array, seen: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Frames (n, T, R, R, 3), their embeddings (n, T, D), and what is imagined after the first ``seen``: (n, H, D)."""
    model: Any = subject.model
    rows = windows.rows(chosen)[:, :, 0]
    frames = torch.from_numpy(store.read_frames(rows.flatten())).unflatten(0, rows.shape)
    z = subject.encoder(frames.flatten(0, 1).to(subject.device)).unflatten(0, rows.shape)
    blocks = model.normalise_actions(windows.batch(chosen).actions.to(subject.device))
    past, ahead = blocks[:, : seen - 1], blocks[:, seen - 1 : -1]
    imagined = model.rollout(z[:, :seen], past, ahead.unsqueeze(1))[:, 0]
    return frames, z, imagined


# -- numbers ---------------------------------------------------------------------------------------------------------


def _measure(
    futures: _Futures, real: Array, drawn: Array, imagined: Array, behind: Array, detector: Detector | None
) -> dict[str, Any]:
    """All numbers, by step ahead, as plain JSON values."""
    seen, z = futures.seen, futures.z
    ahead, spread = z[:, seen:], z.flatten(0, 1).var(0).sum()
    if not spread > 0:
        raise DataError(ALL_SAME)
    latent = (futures.imagined - ahead).square().sum(-1).mean(0) / spread
    held = (z[:, seen - 1 : seen] - ahead).square().sum(-1).mean(0) / spread
    wanted = real[:, seen:]
    moves = (np.abs(wanted.astype(np.int16) - behind).max(-1) > FOREGROUND_LEVELS).mean()
    pictures = {
        "reconstructed": drawn[:, seen:],
        "imagined": imagined,
        "nothing moves": np.broadcast_to(real[:, seen - 1 : seen], wanted.shape),
        "background": np.broadcast_to(behind, wanted.shape),
    }
    numbers: dict[str, Any] = {
        "seen": seen,
        "windows": len(real),
        "foreground": float(moves),
        "latent": latent.tolist(),
        "latent_if_nothing_moves": held.tolist(),
        "decibels": {name: decibels(shown, wanted) for name, shown in pictures.items()},
    }
    if detector:
        names = ("reconstructed", "imagined", "nothing moves")
        places = {name: place_errors(detector, pictures[name], wanted) for name in names}
        numbers["places"] = {"what": detector.what, "errors": places}
    return numbers


# -- what is said and shown ------------------------------------------------------------------------------------------


def _findings(
    subject: Subject,
    asked: dict[str, Any],
    numbers: dict[str, Any],
    drawer: Drawer,
    settings: DecodeSettings,
    detector: Detector | None,
) -> Findings:
    caption = "Held-out episodes: what happened, its reconstruction, and what was imagined open loop."
    return Findings(
        verb=VERB,
        title=f"What {subject.name} imagines",
        question=asked,
        tables=(_pictures_table(numbers), *([_places_table(numbers)] if detector else [])),
        sentences=tuple(_sentences(subject, numbers, drawer, settings)),
        numbers=numbers | {"skip": subject.model.frame_skip},
        files={FILM: caption},
    )


def _sentences(subject: Subject, numbers: dict[str, Any], drawer: Drawer, settings: DecodeSettings) -> list[str]:
    seen, skip, count = numbers["seen"], subject.model.frame_skip, numbers["windows"]
    weight = drawer.about["settings"]["foreground"]
    said = [
        f"Seen are {seen} real frames; then {settings.blocks} blocks of {skip} actions are imagined open loop, under "
        f"the recorded actions (n = {count} windows of episodes that the decoder has not seen).",
        f"Decibels are of whole frames, higher is better; {100 * numbers['foreground']:.1f} % of the pixels differ "
        "from the background, the median of the data.",
        f"In the decoder's loss these pixels weigh {weight:g} times as much as others. Plain errors can leave it at "
        "the background; weighted ones draw things a little too large where the place is uncertain.",
        "Latent error: mean squared distance to the real frame's embedding, in units of the embeddings' variance.",
    ]
    if drawer.about.get("own"):
        said.append("The decoder is the model's own: it was trained with it, by method.reconstruction.")
    if places := numbers.get("places"):
        lost = sum(e["visible"] - e["found"] for e in places["errors"]["imagined"])
        total = sum(e["visible"] for e in places["errors"]["imagined"])
        said.append(
            f"The {places['what']} is found by its colour, in drawn frames as in real ones; in {lost} of {total} "
            f"imagined frames it was not found, and these do not count. Pixels are those of a frame of {UNIT}."
        )
    return said


def _pictures_table(numbers: dict[str, Any]) -> Table:
    header = (
        "blocks ahead",
        "imagined, dB",
        "reconstructed, dB",
        "nothing moves, dB",
        "background, dB",
        "latent error",
    )
    levels = numbers["decibels"]
    columns = [levels[name] for name in ("imagined", "reconstructed", "nothing moves", "background")]
    rows = [
        (str(step + 1), *(f"{column[step]:.1f}" for column in columns), f"{numbers['latent'][step]:.3f}")
        for step in range(len(numbers["latent"]))
    ]
    return Table("Frames, by blocks ahead", header, tuple(rows))


def _places_table(numbers: dict[str, Any]) -> Table:
    places = numbers["places"]
    header = ("blocks ahead", "imagined, median", "90 %", "reconstructed, median", "90 %", "nothing moves, median", "n")
    names = ("imagined", "reconstructed", "nothing moves")
    rows = []
    for step, (imagined, reconstructed, still) in enumerate(zip(*(places["errors"][n] for n in names), strict=True)):
        cells = (imagined["median"], imagined["p90"], reconstructed["median"], reconstructed["p90"], still["median"])
        rows.append(
            (str(step + 1), *(NONE if cell is None else f"{cell:.2f}" for cell in cells), str(imagined["found"]))
        )
    return Table(f"Error of the {places['what']}'s place, in pixels of {UNIT}", header, tuple(rows))


def _strips(real: Array, reconstructed: Array, imagined: Array, seen: int, count: int) -> list[Strip]:
    shown = np.concatenate([reconstructed[:, :seen], imagined], axis=1)
    return [Strip(*each, seen) for each in zip(real[:count], reconstructed[:count], shown[:count], strict=True)]


BY_PICTURE = {"imagined": COLOURS[1], "reconstructed": COLOURS[0], "nothing moves": GREY, "background": COLOURS[3]}
DASHES = {"imagined": "-", "reconstructed": "-", "nothing moves": "--", "background": ":"}


@styled
def draw(findings: Findings, strips: list[Strip]) -> Figure:
    """The strips of some episodes above the error by step."""
    numbers = findings.numbers
    steps = numbers["seen"] + len(numbers["latent"])
    width = min(12.0, 1.2 + 0.85 * steps)
    strip_height = 0.35 + 3 * (width - 1.2) / steps
    figure, panels = strips_figure(width, [*[strip_height] * len(strips), 2.4])
    for number, (axes, strip) in enumerate(zip(panels[:-1], strips, strict=True)):
        show_strip(axes, strip, f"Held-out episode {'ABCDEFGH'[number % 8]}")
    _draw_errors(panels[-1], numbers)
    return figure


def _draw_errors(axes: Any, numbers: dict[str, Any]) -> None:
    """Place errors where there is a detector, else decibels."""
    ahead = range(1, len(numbers["latent"]) + 1)
    if places := numbers.get("places"):
        for name, errors in places["errors"].items():
            medians = [np.nan if e["median"] is None else e["median"] for e in errors]
            axes.plot(ahead, medians, DASHES[name], color=BY_PICTURE[name], marker="o", markersize=3, label=name)
        axes.set_ylabel(f"error of the {places['what']}'s place,\nmedian, px of {UNIT}")
        axes.set_ylim(bottom=0)
    else:
        for name, levels in numbers["decibels"].items():
            axes.plot(ahead, levels, DASHES[name], color=BY_PICTURE[name], marker="o", markersize=3, label=name)
        axes.set_ylabel("likeness to the real frame, dB")
    axes.set_xlabel(f"blocks of {numbers['skip']} actions ahead")
    axes.set_xticks(list(ahead))
    axes.grid(axis="y", color=FAINT, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8)
