"""Surprise: does a model notice what its world cannot do?

Held-out episodes are lived through again with the recorded actions, undisturbed and with one thing changed (see
``trajectories.py``). At every frame t the model is asked what it expected:

    error       ‖z_t − ẑ_t‖²,     ẑ_t predicted from the real frames before t and the executed actions
    difference  ‖z_t − z_{t-1}‖², which takes no model of the world: how much the picture has changed

A large jump shows in both. A small one hides among the changes that actions make, unless one knows what they make.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError, LewmError
from lewm.extras import import_extra
from lewm.files import check_output, json_digest, leaving_no_empty_folders, only_writer
from lewm.types import ProgressCallback
from lewm.understand.episodes import another_kind
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.foresight import Foresight, squared_distance
from lewm.understand.states import recorded_states
from lewm.understand.subject import Subject, question
from lewm.understand.surprise_findings import ROWS, VERB, SurpriseSettings, surprise_findings
from lewm.understand.surprise_rows import MATCHED_ROWS, Row, RowJournal, write_rows
from lewm.understand.trajectories import (
    UNDISTURBED,
    Change,
    Excerpt,
    Matched,
    changes_of,
    episodes_long_enough,
    matched,
    simulator,
)


def fits(subject: Subject) -> str | None:
    """Why it cannot be measured; None: it can."""
    try:
        check_subject(subject)
    except LewmError as error:
        return str(error)
    return None


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """Measure, or read what was found before; written into ``out``."""
    return surprised(subject, store, SurpriseSettings(12 if quick else 40, seed=seed), out, on_progress)


def surprised(
    subject: Subject, store: EpisodeStore, settings: SurpriseSettings, out: Path, on_progress: ProgressCallback | None
) -> Findings:
    """``surprise``, or what an earlier call found; written into ``out``."""
    findings = read_findings(out, VERB, asked_of(subject, store, settings))
    if findings is None:
        findings = surprise(subject, store, settings, out, on_progress)
        remark = another_kind(subject, store)
        findings = replace(findings, sentences=(*findings.sentences, *([remark] if remark else [])))
        from lewm.understand.surprise_figure import draw  # matplotlib takes its time

        write_findings(out, findings, draw)
    return findings


def surprise(
    subject: Subject,
    store: EpisodeStore,
    settings: SurpriseSettings | None = None,
    out: Path = Path("understanding"),
    on_progress: ProgressCallback | None = None,
) -> Findings:
    """Measure how a world model notices changes that its world cannot make; every frame's row goes to ``out``.

    An interrupted call goes on behind its finished trajectories. on_progress: counts trajectories.
    """
    settings = settings or SurpriseSettings()
    changes, foresight = check_subject(subject), Foresight(subject.model)
    import_extra("scipy.stats", "understand")  # its absence is said now, not after the work
    excerpt = _excerpt(foresight, settings)
    asked = asked_of(subject, store, settings)
    check_output(out / ROWS, MATCHED_ROWS, [store.path])
    busy = f"Another process measures surprise in {out}. Wait, or take another --out."
    with leaving_no_empty_folders(out), only_writer(out / f".{VERB}.lock", busy):
        with RowJournal(_journal(out, asked), _rows_of_one(excerpt, foresight, changes)) as journal:
            rows = _live(subject, store, settings, excerpt, changes, foresight, journal, on_progress)
        write_rows(out / ROWS, rows)
        journal.remove()
    return surprise_findings(subject, asked, rows, changes, excerpt, foresight.history, settings)


def check_subject(subject: Subject) -> tuple[Change, ...]:
    """The changes of the model's world. A model that predicts nothing, or whose world changes nothing, is refused."""
    Foresight(subject.model)
    if subject.world is None:
        problem = f"{subject.source} was trained in no world of ours, and nothing can be changed in a recording"
        raise ConfigError(f"{problem}. Take a model of a world with a simulator (`lewm envs`).")
    return changes_of(subject.world)


def asked_of(subject: Subject, store: EpisodeStore, settings: SurpriseSettings) -> dict[str, Any]:
    """The question that these arguments ask."""
    changes = changes_of(subject.world) if subject.world else ()
    described = [[c.name, c.kind, c.colour, c.distance, c.place, c.free] for c in changes]
    fields = {"trajectories": settings.trajectories, "before": settings.before, "after": settings.after}
    return question(VERB, subject, store, fields | {"seed": settings.seed, "changes": _plain(described)})


def _plain(values: list[list[Any]]) -> list[list[Any]]:
    """As JSON gives them back."""
    return [[list(value) if isinstance(value, tuple) else value for value in each] for each in values]


def _excerpt(foresight: Foresight, settings: SurpriseSettings) -> Excerpt:
    changed = foresight.history + settings.before
    return Excerpt(foresight.frame_skip, changed + settings.after, changed)


def _journal(out: Path, asked: dict[str, Any]) -> Path:
    """Where unfinished work is kept; how many trajectories are wanted changes none of them."""
    same = asked | {"settings": {k: v for k, v in asked["settings"].items() if k != "trajectories"}}
    return out / f"{VERB}-{json_digest(same)[:12]}.part.csv"


def _rows_of_one(excerpt: Excerpt, foresight: Foresight, changes: Sequence[Change]) -> int:
    return (excerpt.blocks + 1 - foresight.history) * (len(changes) + 1)


def _live(
    subject: Subject,
    store: EpisodeStore,
    settings: SurpriseSettings,
    excerpt: Excerpt,
    changes: Sequence[Change],
    foresight: Foresight,
    journal: RowJournal,
    on_progress: ProgressCallback | None,
) -> list[Row]:
    """The rows of as many trajectories as were asked for, or as there are."""
    assert subject.world is not None
    rows, done = list[Row](), 0
    with simulator(subject.world, foresight.image_size) as env:
        states = recorded_states(store, env.state_names)
        for episode in episodes_long_enough(store, excerpt):
            if done == settings.trajectories:
                break
            if on_progress:
                on_progress(done, settings.trajectories)
            known = journal.of(episode)
            if known is None:
                lived = matched(env, store, states, episode, excerpt, changes, settings.seed)
                known = [] if lived is None else list(_rows(lived, excerpt, foresight, changes))
                journal.add(episode, known)
            rows += known
            done += bool(known)
    if done < 2:
        need = f"Surprise takes 2 episodes or more with {excerpt.steps} actions and room for every change"
        raise DataError(f"{need}; {store.path} has {done}. Collect more, or ask for fewer frames before and after.")
    if on_progress:
        on_progress(done, done)
    return rows


def _rows(lived: Matched, excerpt: Excerpt, foresight: Foresight, changes: Sequence[Change]) -> Iterator[Row]:
    """Errors and differences of every frame that has a full history."""
    kinds = {UNDISTURBED: UNDISTURBED} | {change.name: change.kind for change in changes}
    plain = foresight.embed(lived.frames[UNDISTURBED])
    for name, frames in lived.frames.items():
        z_ND = plain
        if name != UNDISTURBED:  # until they part, trajectories have the same frames
            z_ND = plain.clone()
            z_ND[excerpt.changed :] = foresight.embed(frames[excerpt.changed :])
        errors = foresight.errors(z_ND, lived.actions, excerpt.frame_skip)
        if not np.isfinite(errors).all():
            raise DataError(f"The model's errors in episode {lived.episode} are not finite. Check its weights.")
        first = len(z_ND) - len(errors)
        differences = squared_distance(z_ND[first:], z_ND[first - 1 : -1])
        for number, (error, difference) in enumerate(zip(errors.tolist(), differences.tolist(), strict=True), first):
            offset = number - excerpt.changed
            step = number * excerpt.frame_skip
            yield Row(lived.episode, lived.row, name, kinds[name], offset, step, error, difference)
