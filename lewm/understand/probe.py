"""Probes: which physical quantities can be read from frozen embeddings, and how well.

Episodes are split into training, validation and test parts, so that nothing of a test episode is seen. Probes read from
one embedding, and from as many as the model's predictor sees, side by side: one frame does not show a velocity.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lewm.data.store import EpisodeStore
from lewm.envs.registry import ENTRIES, EnvEntry, env_names
from lewm.files import json_digest, read_json, write_json
from lewm.types import Array, ProgressCallback
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.probe_findings import draw, probe_findings
from lewm.understand.probe_settings import VERB, ProbeSettings
from lewm.understand.regression import MlpSettings, Scale, fit_mlps, fit_ridge
from lewm.understand.subject import Subject, embeddings, question
from lewm.understand.targets import Target, Truth, read_truth
from lewm.understand.views import LEAST_EPISODES, Measured, View, ViewResult, load_embeddings, split_episodes, view_of

VERSION = 1  # of how results come about: those of another are not used again


def fits(subject: Subject) -> str | None:
    """Why a model cannot be probed; None: it can."""
    del subject
    return None


def ask(
    subject: Subject, store: EpisodeStore, settings: ProbeSettings, others: Sequence[Subject] = (), seed: int = 0
) -> dict[str, Any]:
    """The question that ``probe`` answers with these arguments."""
    digests = [other.digest for other in others]
    asked = {**asdict(settings), "properties": list(settings.properties), "seed": seed, "version": VERSION}
    return question(VERB, subject, store, {**asked, "others": digests})


def investigate(
    subject: Subject,
    store: EpisodeStore,
    out: Path,
    seed: int = 0,
    quick: bool = False,
    on_progress: ProgressCallback | None = None,
) -> Findings:
    """Probe a model, or read what was found before, and write it into a folder. quick: one split, fewer epochs."""
    wanted = (ProbeSettings(), ProbeSettings(splits=1, epochs=20))[: 1 + quick]  # better than asked for is welcome
    for settings in wanted:
        if found := read_findings(out, VERB, ask(subject, store, settings, (), seed)):
            return found
    found = probe(subject, store, wanted[-1], seed=seed, parts=parts_of(out), on_progress=on_progress)
    write_findings(out, found, draw)
    return found


def parts_of(out: Path) -> Path:
    """Where finished splits are kept, so that they are not computed again."""
    return out / f"{VERB}.parts"


def probe(
    subject: Subject,
    store: EpisodeStore,
    settings: ProbeSettings,
    others: Sequence[Subject] = (),
    seed: int = 0,
    parts: Path | None = None,
    on_progress: ProgressCallback | None = None,
    announce: Callable[[str], None] | None = None,
) -> Findings:
    """Probe a model on a dataset, and others beside it on the same frames and splits.

    parts: a folder for the results of each split, which are not computed again.  on_progress: counts frames that are
    embedded, then epochs.  announce: told in a sentence what is going to be written where.
    """
    truth = read_truth(store, _world(subject, store), settings.properties)
    works = [_Work(model, store, truth, settings, seed, parts) for model in (subject, *others)]
    done, total, models = 0, sum(work.epochs for work in works), []
    for work in works:
        with embeddings(work.subject, store, on_progress, announce) as features:
            z_FD = load_embeddings(features, store, settings.tokens)
        report = None if on_progress is None else _shifted(on_progress, done, total)
        models.append((work.subject, work.run(z_FD, report)))
        done += work.epochs
    asked = ask(subject, store, settings, others, seed)
    return probe_findings(asked, models, truth, store, _world(subject, store), settings.splits)


@dataclass(frozen=True)
class _Work:
    """The probing of one model."""

    subject: Subject
    store: EpisodeStore
    truth: Truth
    settings: ProbeSettings
    seed: int
    parts: Path | None

    @functools.cached_property
    def views(self) -> list[View]:
        """One embedding, and as many as the predictor sees, if enough episodes are that long."""
        model, visible, most = self.subject.model, self.truth.visible, self.settings.most_frames
        counts = dict.fromkeys((1, model.history))
        one, *several = (view_of(self.store, frames, model.frame_skip, visible, most, self.seed) for frames in counts)
        split_episodes(one.episodes, self.seed, 0, self.store)  # refuses too few, before the work
        return [one, *(view for view in several if len(np.unique(view.episodes)) >= LEAST_EPISODES)]

    @property
    def epochs(self) -> int:
        """At most, of all its MLPs."""
        return len(self.views) * self.settings.splits * self.settings.epochs

    def run(self, z_FD: Array, report: Callable[[int], None] | None) -> tuple[ViewResult, ...]:
        """Probe embeddings (F, D) of all frames. report: told how many epochs are done."""
        results, done = list[ViewResult](), 0
        for view in self.views:
            inputs, measured = z_FD[view.places].reshape(len(view.places), -1), list[Measured]()
            for split in range(self.settings.splits):
                on_epoch = None if report is None else _added(report, done)
                measured.append(self._split(view, inputs, split, on_epoch))
                done += self.settings.epochs
                if report:  # MLPs may have ended early
                    report(done)
            results.append(ViewResult(view, inputs.shape[1], tuple(measured)))
        return tuple(results)

    def _split(self, view: View, inputs: Array, split: int, on_epoch: Callable[[int], None] | None) -> Measured:
        """One split, from its file if it is there."""
        if self.parts is None:
            return self._measure(view, inputs, split, on_epoch)
        asked = ask(self.subject, self.store, self.settings, (), self.seed)
        asked["settings"].pop("splits")
        path = self.parts / f"{json_digest([asked, view.frames, split])[:24]}.json"
        if not path.is_file():
            write_json(path, self._measure(view, inputs, split, on_epoch))
        kept: Measured = read_json(path)
        return kept

    def _measure(self, view: View, inputs: Array, split: int, on_epoch: Callable[[int], None] | None) -> Measured:
        train, validation, test = split_episodes(view.episodes, self.seed, split, self.store)
        scale = Scale.of(inputs[train])
        x, x_val, x_test = (scale.to(inputs[part]).astype(np.float32) for part in (train, validation, test))
        values = [target.values[view.places[:, -1]] for target in self.truth.targets]
        scales = [Scale.of(each[train]) for each in values]
        y, y_val = ([s.to(each[part]) for s, each in zip(scales, values, strict=True)] for part in (train, validation))
        linear = fit_ridge(x, np.concatenate(y, axis=1), self.settings.ridge)(x_test)
        ends = np.cumsum([each.shape[1] for each in y])[:-1]
        mlps = fit_mlps(
            *(x, y, x_val, y_val, MlpSettings(epochs=self.settings.epochs), (self.seed, split), self.subject.device),
            on_epoch=on_epoch,
        )(x_test)
        measured: Measured = {}
        predictions = {"linear": np.split(linear, ends, axis=1), "mlp": mlps}
        for place, (target, own) in enumerate(zip(self.truth.targets, scales, strict=True)):
            measured[target.name] = {
                kind: measure(target, own, by_target[place], values[place][test])
                for kind, by_target in predictions.items()
            }
        return measured


def _shifted(on_progress: ProgressCallback, done: int, total: int) -> Callable[[int], None]:
    return lambda epochs: on_progress(done + epochs, total)


def _added(report: Callable[[int], None], done: int) -> Callable[[int], None]:
    return lambda epoch: report(done + epoch)


def _world(subject: Subject, store: EpisodeStore) -> EnvEntry | None:
    """The world of the model, or else that of the data, if it is known here."""
    env_names()  # imports the user's
    known = {entry.gym_id: entry for entry in ENTRIES.values()}
    return subject.world or known.get(store.environment or "")


def measure(target: Target, scale: Scale, predicted: Array, truth: Array) -> dict[str, Any]:
    """How well z-scored predictions (n, k) fit the truth (n, k), in its own numbers. None: that is undefined.

    mse: of z-scored numbers that vary.  r: Pearson's, the mean over numbers.  error: a typical one, in the unit.
    """
    if not scale.varies.any():
        return {"mse": None, "r": None, "r_each": [None] * truth.shape[1], "error": None}
    varies, z = scale.varies, scale.to(truth)
    each = [pearson(p, t) if v else None for p, t, v in zip(predicted.T, z.T, varies, strict=True)]
    defined = [r for r in each if r is not None]
    return {
        "mse": float(np.square(predicted - z)[:, varies].mean()),
        "r": float(np.mean(defined)) if defined else None,
        "r_each": each,
        "error": target.error(scale.back(np.where(varies, predicted, 0.0)), truth),
    }


def pearson(a: Array, b: Array) -> float | None:
    """Pearson's r of numbers (n,) and (n,); None where one of them does not vary, or there is but one."""
    if len(a) < 2 or not (Scale.of(a[:, None]).varies[0] and Scale.of(b[:, None]).varies[0]):
        return None
    return float(np.clip(np.corrcoef(a, b)[0, 1], -1, 1))
