"""SIGReg is the statistic of the paper, tells Gaussians from the rest, and can be descended."""

from __future__ import annotations

import cmath
import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from lewm.model.sigreg import SIGReg, characteristic_function, random_directions, sigreg
from lewm.types import ALONE

CPU = torch.device("cpu")


def some_directions(dim: int, count: int, seed: int = 0) -> torch.Tensor:
    directions = torch.randn(dim, count, generator=torch.Generator().manual_seed(seed))
    return directions / directions.norm(dim=0)


def integrand(h_B: np.ndarray, t: float) -> float:
    """w(t) |phi_N(t) - phi_0(t)|^2 for the projections of one time step on one direction, as in the paper."""
    empirical = sum(cmath.exp(1j * t * h) for h in h_B) / len(h_B)
    gaussian = math.exp(-(t**2) / 2)
    return math.exp(-(t**2) / 2) * abs(empirical - gaussian) ** 2


def trapezoid(h_B: np.ndarray, start: float, end: float, knots: int) -> float:
    step = (end - start) / (knots - 1)
    values = [integrand(h_B, start + k * step) for k in range(knots)]
    return step * sum((a + b) / 2 for a, b in itertools.pairwise(values))


def reference(z_NBD: torch.Tensor, directions_DM: torch.Tensor, knots: int) -> float:
    """The paper's formula, slowly, in float64, over negative and positive t."""
    h_NBM = z_NBD.double().numpy() @ directions_DM.double().numpy()
    n, batch, m = h_NBM.shape
    statistics = [
        batch * (trapezoid(h_NBM[i, :, j], -3.0, 0.0, knots) + trapezoid(h_NBM[i, :, j], 0.0, 3.0, knots))
        for i in range(n)
        for j in range(m)
    ]
    return sum(statistics) / len(statistics)


@pytest.mark.parametrize("knots", [17, 9, 2])
def test_it_is_the_formula_of_the_paper(knots: int) -> None:
    torch.manual_seed(0)
    z_NBD, directions_DM = 1.5 * torch.randn(2, 8, 5) + 0.3, some_directions(5, 6)
    expected = reference(z_NBD, directions_DM, knots)
    assert sigreg(z_NBD, directions_DM, knots).item() == pytest.approx(expected, rel=1e-5)


def test_seventeen_knots_are_enough_for_the_integral() -> None:
    torch.manual_seed(0)
    z_NBD, directions_DM = 0.5 * torch.randn(1, 8, 5) + 0.3, some_directions(5, 2)
    integral = reference(z_NBD, directions_DM, 1501)
    errors = [abs(sigreg(z_NBD, directions_DM, knots).item() - integral) for knots in (5, 9, 17)]
    assert errors[2] < 2e-3 * integral
    # Halving the step divides the error of a trapezoid rule by four.
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_it_ranks_clouds_by_how_far_they_are_from_the_gaussian() -> None:
    generator = torch.Generator().manual_seed(0)
    gaussian = torch.randn(1, 2048, 2, generator=generator)
    clouds = {
        "gaussian": gaussian,
        "uniform": (torch.rand(1, 2048, 2, generator=generator) - 0.5) * math.sqrt(12),  # unit variance
        "shifted": gaussian + 1,
        "scaled": gaussian * 2,
        "rank one": gaussian[..., :1].expand(-1, -1, 2),
    }
    level = {name: sigreg(cloud, some_directions(2, 256)).item() for name, cloud in clouds.items()}
    assert level["gaussian"] < 0.2 * level["uniform"]
    assert level["uniform"] < 0.5 * min(level["shifted"], level["scaled"], level["rank one"])


def test_the_level_of_a_gaussian_does_not_depend_on_the_batch() -> None:
    """N times the squared error of a mean over N: constant in expectation, unlike any other cloud's."""
    directions_DM = some_directions(8, 128)
    torch.manual_seed(0)
    small, large = (sigreg(torch.randn(32, batch, 8), directions_DM).item() for batch in (32, 512))
    assert small == pytest.approx(large, rel=0.15)


def test_descending_it_turns_a_collapsed_cloud_into_a_gaussian_one() -> None:
    torch.manual_seed(0)
    regulariser = SIGReg()
    z = torch.nn.Parameter(2 + 0.01 * torch.randn(1, 100, 3))
    optimiser = torch.optim.Adam([z], lr=0.1)
    for step in range(120):
        optimiser.zero_grad()
        regulariser(z, random_directions(3, 16, 0, step, CPU), ALONE).backward()
        optimiser.step()

    cloud = z.detach()
    unseen = some_directions(3, 256, seed=99)
    assert sigreg(cloud, unseen) < sigreg(torch.randn(1, 100, 3), unseen)
    assert cloud.mean(dim=1).abs().max() < 0.1
    torch.testing.assert_close(torch.cov(cloud[0].T), torch.eye(3), rtol=0, atol=0.15)


def test_each_step_has_its_own_unit_directions() -> None:
    first, second = random_directions(8, 32, 3, 0, CPU), random_directions(8, 32, 3, 1, CPU)
    assert first.shape == (8, 32)
    torch.testing.assert_close(first.norm(dim=0), torch.ones(32))
    assert not torch.allclose(first, second)
    assert not torch.allclose(first, random_directions(8, 32, 4, 0, CPU))


def test_directions_depend_on_seed_and_step_alone() -> None:
    torch.manual_seed(0)
    expected = random_directions(4, 16, 5, 7, CPU)
    state = torch.get_rng_state()
    SIGReg()(torch.ones(2, 8, 4), random_directions(4, 16, 5, 123, CPU), ALONE)
    assert torch.equal(random_directions(4, 16, 5, 7, CPU), expected)
    assert torch.equal(torch.get_rng_state(), state)  # nor are global random numbers consumed


def test_half_precision_embeddings_are_measured_in_float32() -> None:
    torch.manual_seed(0)
    z_NBD, directions_DM = torch.randn(1, 64, 8).bfloat16(), some_directions(8, 32)
    expected = sigreg(z_NBD.float(), directions_DM)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        measured = sigreg(z_NBD, directions_DM)
    assert measured.dtype == torch.float32
    assert torch.equal(measured, expected)


@dataclass(frozen=True)
class WithOther:
    """A process that shares a batch with another one, whose part of each mean is known."""

    others: torch.Tensor
    count: int = 2

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.others) / 2


def test_processes_that_share_a_batch_get_the_statistic_of_all_of_it() -> None:
    torch.manual_seed(0)
    z_NBD, directions_DM = 1.5 * torch.randn(2, 8, 5), some_directions(5, 6)
    knots = torch.linspace(0, 3, 17)
    other = characteristic_function(z_NBD[:, 4:], directions_DM, knots)
    whole = sigreg(z_NBD, directions_DM)
    torch.testing.assert_close(SIGReg()(z_NBD[:, :4], directions_DM, WithOther(other)), whole)
    parts = [sigreg(z_NBD[:, part], directions_DM) for part in (slice(4), slice(4, 8))]
    assert abs(sum(parts) / 2 - whole) > 0.1 * whole  # which their own statistics do not give
