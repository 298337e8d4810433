"""`lewm understand decode`: what embeddings and imagined futures look like."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lewm.cli.frame import console, say
from lewm.cli.progress import progress_bar
from lewm.cli.understand.common import SubjectArgs, episodes_for, parse_checked, show
from lewm.files import FILM, check_output
from lewm.types import ProgressCallback

if TYPE_CHECKING:
    from lewm.data.store import EpisodeStore
    from lewm.understand.decoder import DecoderSettings, Drawer
    from lewm.understand.subject import Subject


@dataclass(frozen=True, kw_only=True)
class DecodeArgs(SubjectArgs):
    """Draw what a model's embeddings show, and the futures that it imagines, beside what happened."""

    train: bool = False  # Train a decoder on frozen embeddings first, unless it is there. An interrupt loses little.
    decoder: Path | None = None  # The decoder's file; None: decoder.safetensors among the findings.
    # A run: what each of its checkpoints shows, by a decoder of its own. Nothing else, without --train or --decoder.
    series: Path | None = None
    blocks: int = 8  # Action blocks to imagine.
    windows: int = 200  # To measure on, of episodes that the decoder has not seen.
    shown: int = 3  # Episodes in the film.
    steps: int = 2000  # Of the decoder's training.
    batch: int = 32  # Frames per step.
    lr: float = 2e-3  # Peak learning rate.
    foreground: float = 6.0  # Weight of pixels that differ from the background, in training.
    frames: int = 40_000  # At most so many are learned from; they are kept in memory.
    width: int | None = None  # Of the decoder; None: 256, or 128 for frames below 112 pixels.


def run(arguments: list[str]) -> None:
    """Train what is missing, measure, show, and write."""
    args = parse_checked(DecodeArgs, arguments, "understand decode")
    from lewm.understand import decode
    from lewm.understand.decoder import DecoderSettings
    from lewm.understand.findings import check_outputs
    from lewm.understand.subject import model_folder, open_episodes, open_subject

    settings = decode.DecodeSettings(args.blocks, args.windows, args.shown, args.seed)
    training = DecoderSettings(args.steps, args.batch, args.lr, args.foreground, args.frames, args.width, args.seed)
    inputs = [model_folder(args.checkpoint), *([args.data] if args.data else [])]
    check_outputs(args.folder, decode.VERB, inputs)
    check_output(args.folder / decode.FILM, FILM, inputs)
    subject = open_subject(args.checkpoint, args.device)
    # Before episodes are collected: whoever has no decoder need not wait for them.
    drawer = None if args.train or args.series else decode.find_drawer(subject, args.folder, args.decoder)
    with open_episodes(episodes_for(args, subject), subject) as store:
        if args.series:
            _series(args, store, training)
            if not (args.train or args.decoder):
                return
        drawer = drawer or _drawer(args, subject, store, training)
        with progress_bar(console, "imagine") as on_progress:
            findings = decode.decode(subject, store, args.folder, drawer, settings, on_progress)
    show(findings, args.folder)
    say(f"Film: {args.folder / decode.FILM}")


def _drawer(args: DecodeArgs, subject: Subject, store: EpisodeStore, training: DecoderSettings) -> Drawer:
    """The decoder, trained now if that is asked for."""
    from lewm.understand.decode import find_drawer
    from lewm.understand.decoder import decoder_place, train_decoder

    if not args.train:
        return find_drawer(subject, args.folder, args.decoder)
    place = args.decoder or decoder_place(args.folder)
    with progress_bar(console, "decoder") as on_progress:
        drawer = train_decoder(subject, store, training, place, on_progress)
    say(f"Decoder: {place}")
    return drawer


def _series(args: DecodeArgs, store: EpisodeStore, training: DecoderSettings) -> None:
    from lewm.understand.decode_series import decode_series

    assert args.series is not None
    with contextlib.ExitStack() as stack:

        def progress(name: str) -> ProgressCallback:
            stack.close()
            return stack.enter_context(progress_bar(console, name))

        findings = decode_series(args.series, store, args.folder, training, args.device, progress)
    show(findings, args.folder)
