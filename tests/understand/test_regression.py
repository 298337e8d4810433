"""The probes themselves: ridge regression in closed form, and MLPs that share nothing but their inputs."""

from __future__ import annotations

import numpy as np
import torch

from lewm.understand.regression import MlpSettings, fit_mlps, fit_ridge


def test_ridge_is_the_same_from_either_side() -> None:
    rng = np.random.default_rng(0)
    x, y, new = rng.normal(size=(30, 20)), rng.normal(size=(30, 2)), rng.normal(size=(5, 20))
    narrow = fit_ridge(x, y, 0.1)(new)
    expected = new @ np.linalg.solve(x.T @ x + 0.1 * np.eye(20), x.T @ y)
    np.testing.assert_allclose(narrow, expected, rtol=1e-9)
    wide = np.concatenate([x, rng.normal(size=(30, 20))], axis=1)
    expected = np.linalg.solve(wide.T @ wide + 0.1 * np.eye(40), wide.T @ y)
    np.testing.assert_allclose(fit_ridge(wide, y, 0.1)(wide), wide @ expected, rtol=1e-6)


def test_mlps_side_by_side_do_not_feel_each_other() -> None:
    """Beside a target that cannot be learned, or one of enormous size, the other is learned as well as alone."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 3)).astype(np.float32)
    easy = np.sin(2 * x[:, :1]) * x[:, 1:2]
    wild = 1e4 * rng.normal(size=(2000, 2))
    settings, train, val, test = MlpSettings(64, batch=64), slice(1400), slice(1400, 1700), slice(1700, 2000)

    def error(targets: list[np.ndarray]) -> float:
        parts = x[train], [t[train] for t in targets], x[val], [t[val] for t in targets]
        predicted = fit_mlps(*parts, settings, (0,), torch.device("cpu"))(x[test])
        assert [p.shape[1] for p in predicted] == [t.shape[1] for t in targets]
        return float(np.square(predicted[0] - targets[0][test]).mean())

    alone = error([easy])
    assert alone < 0.02
    assert error([easy, wild]) < 2 * alone


def test_an_mlp_ends_where_validation_is_best() -> None:
    """Noise is learned by heart, unless training ends in time: the mean would be as good."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(100, 20)), rng.normal(size=(100, 1))
    epochs: list[int] = []
    settings, device = MlpSettings(epochs=200, patience=3), torch.device("cpu")
    predict = fit_mlps(x[:60], [y[:60]], x[60:], [y[60:]], settings, (0,), device, epochs.append)
    assert epochs[-1] < 50
    assert np.square(predict(x[60:])[0] - y[60:]).mean() < 1.3 * np.square(y[60:]).mean()
