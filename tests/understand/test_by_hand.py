"""Numbers of findings, recomputed in another way: by other packages, or by the model's own slow methods."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score

from lewm.config import CollectConfig
from lewm.data.collect import collect
from lewm.train.diagnostics import effective_rank
from lewm.understand.imagine import ImagineSettings, by_step, choose_windows, roll_out
from lewm.understand.likeness import decibels
from lewm.understand.probe import probe
from lewm.understand.probe_settings import ProbeSettings
from lewm.understand.straightness import geometry
from lewm.understand.subject import Subject, embeddings, open_episodes, open_subject
from lewm.understand.surprise_findings import compare
from lewm.understand.trajectories import CHANGES, UNDISTURBED
from lewm.understand.views import load_embeddings, split_groups


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.h5"
    collect("tworoom", path, CollectConfig(20, resolution=28, workers=1, frame_stride=5), 4)
    return path


@pytest.fixture(scope="module")
def subject(debug_run: Path) -> Subject:
    return open_subject(debug_run, "cpu")


def test_tests_of_surprise() -> None:
    rng, changes, count = np.random.default_rng(0), CHANGES["tworoom"][:3], 25
    names = (UNDISTURBED, *(change.name for change in changes))
    errors = {name: np.exp(rng.normal(0.4 * place, 1, (count, 3))) for place, name in enumerate(names)}
    differences = {name: rng.normal(size=(count, 3)) ** 2 for name in names}
    plain, labels = errors[UNDISTURBED][:, 2], np.repeat([1, 0], count)
    found = compare(errors, differences, 2, changes, seed=0)
    ps = []
    for test, change in zip(found, changes, strict=True):
        changed = errors[change.name][:, 2]
        logs = np.log(changed) - np.log(plain)
        d = logs.mean() / logs.std(ddof=1)
        t = torch.tensor(abs(d) * math.sqrt(count)).double()
        # Student's tail by numbers: the density of 24 degrees of freedom, summed.
        x = torch.linspace(0, 400, 2_000_001).double() + t
        ps.append(2 * torch.trapezoid((1 + x**2 / (count - 1)) ** (-count / 2), x).item() / _beta(count - 1))
        assert test.p == pytest.approx(ps[-1], rel=1e-3)
        assert test.effect == pytest.approx(d)
        assert (test.plain, test.error) == (np.median(plain), np.median(changed))
        assert test.auroc == pytest.approx(roc_auc_score(labels, np.concatenate([changed, plain])))
        both = np.concatenate([differences[change.name][:, 2], differences[UNDISTURBED][:, 2]])
        assert test.difference_auroc == pytest.approx(roc_auc_score(labels, both))
        assert test.interval[0] < test.auroc < test.interval[1]
    smallest, middle, largest = sorted(ps)
    holm = {smallest: 3 * smallest, middle: max(3 * smallest, 2 * middle)}
    holm[largest] = max(holm[middle], largest)
    assert [test.holm for test in found] == pytest.approx([min(1, holm[p]) for p in ps], rel=1e-3)


def _beta(degrees: int) -> float:
    """What Student's density is divided by."""
    return math.sqrt(degrees * math.pi) * math.gamma(degrees / 2) / math.gamma((degrees + 1) / 2)


def test_a_linear_probe(subject: Subject, data: Path) -> None:
    with open_episodes(data, subject) as store:
        found = probe(subject, store, ProbeSettings(splits=2, epochs=1))
        with embeddings(subject, store) as features:
            z_FD = load_embeddings(features, store, "mean").astype(np.float64)
        states = store.read_column("state")[store.frame_rows]
        episodes = np.searchsorted(store.offsets, store.frame_rows, side="right")
        mses, rs = [], []
        for split in range(2):
            train, _, test = split_groups(episodes - 1, 0, split, store)
            assert not set(episodes[train]) & set(episodes[test])
            x, y = ((each - each[train].mean(0)) / each[train].std(0) for each in (z_FD, states))
            guess = Ridge(1e-3, fit_intercept=False).fit(x[train], y[train]).predict(x[test])
            mses.append(np.mean((guess - y[test]) ** 2))
            rs.append(np.mean([np.corrcoef(guess[:, k], y[test, k])[0, 1] for k in (0, 1)]))
    measured = found.numbers["models"][0]["views"][0]["found"]["agent position"]["linear"]
    assert measured["mse"] == pytest.approx(np.mean(mses), rel=1e-4)
    assert measured["mse_std"] == pytest.approx(np.std(mses, ddof=1), rel=1e-4)
    assert measured["r"] == pytest.approx(np.mean(rs), rel=1e-4)


def test_imagined_errors(subject: Subject, data: Path) -> None:
    model: Any = subject.model
    with open_episodes(data, subject) as store:
        windows = choose_windows(subject, store, ImagineSettings(blocks=2, windows=5, searches=0))
        rows = by_step(*roll_out(subject, store, windows, lambda _: None), windows.context)
        errors = []
        for each in windows.rows:
            assert len(set(np.searchsorted(store.offsets, each, side="right"))) == 1, "of one episode"
            with torch.no_grad():
                z_TD = model.encode(torch.from_numpy(store.read_frames(each)))
                raw = np.stack([store.actions[row : row + 5] for row in each[:-1]])
                blocks = model.normalise_actions(torch.from_numpy(raw))
                seen = model.history
                ahead = model.rollout(z_TD[None, :seen], blocks[None, : seen - 1], blocks[None, None, seen - 1 :])[0, 0]
            errors.append((ahead - z_TD[seen:]).square().sum(-1).numpy())
    medians = np.median(errors, axis=0)
    assert [row["median"] for row in rows] == pytest.approx(medians.tolist(), rel=1e-3, abs=1e-6)


def test_decibels() -> None:
    real = np.full((2, 1, 4, 4, 3), 100, np.uint8)
    shown = real.copy()
    shown[0, 0] += 10
    shown[1, 0, :2] += 20
    assert decibels(shown, real) == pytest.approx([np.mean([20 * math.log10(255 / e) for e in (10, math.sqrt(200))])])


def test_ranks_and_straightness() -> None:
    rng = np.random.default_rng(0)
    z_ND = torch.from_numpy(rng.normal(size=(300, 4)) * (3, 1, 0.1, 0.0)).float()
    variances = np.linalg.svd((z_ND - z_ND.mean(0)).numpy(), compute_uv=False) ** 2
    share = variances / variances.sum()
    entropy = -sum(s * math.log(s) for s in share if s > 1e-15)
    assert effective_rank(z_ND[:, None]).item() == pytest.approx(math.exp(entropy), rel=1e-3)
    right_angle, straight = torch.tensor([[0, 0], [1, 0], [1, 1], [2, 1.0]]), torch.tensor([[0, 0], [1, 0], [3, 0.0]])
    found = geometry([right_angle, straight])
    assert found.straightness == pytest.approx((0 + 0 + 1) / 3), "every turn counts alike"
    assert found.turns == 3


def test_a_model_that_sees_nothing_uses_no_direction() -> None:
    """All embeddings are the same: that is not full rank."""
    assert effective_rank(torch.full((50, 1, 8), 0.3)).item() == pytest.approx(1.0)
    assert geometry([torch.full((9, 8), 0.3)]).effective_rank == pytest.approx(1.0)
