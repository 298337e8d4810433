"""Diagnostics tell a healthy cloud of embeddings from a collapsed one."""

from __future__ import annotations

import pytest
import torch

from lewm.train.diagnostics import collapse_warning, diagnose, effective_rank, embedding_std, straightness

D = 16
REMEDY = "Stir."


def gaussian(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def test_effective_rank_counts_directions():
    cloud = gaussian(500, 4, D)
    assert effective_rank(cloud) > 0.97 * D
    assert effective_rank(3 * cloud) == pytest.approx(effective_rank(cloud).item(), rel=1e-4)
    flat = cloud.clone()
    flat[..., 5:] = 0
    assert effective_rank(flat) == pytest.approx(5, rel=0.02)
    rank_one = gaussian(500, 4, 1) * gaussian(D)
    assert effective_rank(rank_one) == pytest.approx(1, abs=1e-3)


@pytest.mark.parametrize("place", [0.0, 1.0, 0.1, 1234.5])
def test_a_point_has_the_least_rank(place: float):
    """Though rounding leaves differences, which point everywhere."""
    assert effective_rank(torch.full((256, 4, 8), place) * (1 + gaussian(8))) == 1
    little = 1e-4 * max(place, 1)
    assert effective_rank(place + little * gaussian(256, 4, 8)) == pytest.approx(8, rel=0.03)


def test_embedding_std_is_that_of_the_cloud():
    assert embedding_std(gaussian(2000, 4, D) * 3 + 100) == pytest.approx(3, rel=0.02)


def test_straightness_of_known_paths():
    steps = torch.arange(5.0)[:, None]
    line = (steps * gaussian(1, D)).expand(3, 5, D)
    assert straightness(line) == pytest.approx(1)
    to_and_fro = ((steps % 2) * gaussian(1, D)).expand(3, 5, D)
    assert straightness(to_and_fro) == pytest.approx(-1)
    square = torch.tensor([[[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]]])
    assert straightness(square) == pytest.approx(0)


def test_windows_of_two_frames_have_no_straightness():
    """One velocity turns nowhere: the measurement is left out, where a mean of nothing would be NaN."""
    assert diagnose(gaussian(64, 2, D)).keys() == {"embedding_std", "effective_rank"}
    assert diagnose(gaussian(64, 3, D)).keys() == {"embedding_std", "effective_rank", "straightness"}


@pytest.mark.parametrize("dim", [2, D, 192])
def test_no_warning_for_a_gaussian(dim: int):
    assert collapse_warning(diagnose(gaussian(256, 4, dim)), dim, REMEDY) is None


def test_no_warning_for_an_embedding_that_uses_few_of_its_directions():
    """As a light SIGReg leaves it in a world with two degrees of freedom."""
    assert collapse_warning(diagnose(gaussian(256, 4, 4) @ gaussian(4, 192)), 192, REMEDY) is None


@pytest.mark.parametrize(
    "cloud",
    [
        0.01 * gaussian(256, 4, D),  # nearly a point
        gaussian(256, 4, 1) * torch.ones(D),  # a line
        torch.ones(256, 4, D),  # exactly a point
    ],
)
def test_warning_for_a_collapsed_cloud(cloud: torch.Tensor):
    warning = collapse_warning(diagnose(cloud), D, REMEDY)
    assert warning is not None
    assert "collapsed" in warning
    assert "effective rank 1.0" in warning or embedding_std(cloud) > 0
    assert warning.endswith("of 16. Stir.")
