"""The Triton kernels of a search against the tensor operations they stand for: interpreted on the CPU, or on a GPU."""

import sys

import pytest
import torch

from lewm.kernels import search as kernels
from lewm.plan.noise import normal
from lewm.plan.solver import Problem

KEYS = (0, 1, 7, 2**62 + 5, -3)


def check_noise(device: str) -> None:
    keys, start = torch.tensor(KEYS), torch.tensor(40)
    torch.testing.assert_close(kernels.normal(keys.to(device), start.to(device), 33).cpu(), normal(keys, 40, 33))


def check_sample(device: str) -> None:
    problem = Problem(lambda plans: plans.sum((2, 3)), 5, 9, torch.tensor(KEYS))
    mean_BHA, std_BHA = torch.randn(5, 5, 9), torch.rand(5, 5, 9)
    for iteration in map(torch.tensor, (0, 3)):
        expected = problem.candidates(mean_BHA, std_BHA, problem.noise(7, iteration))
        arguments = (mean_BHA.flatten(1), std_BHA.flatten(1), problem.keys_B, iteration)
        plans = kernels.sample(*(tensor.to(device) for tensor in arguments), 7)
        torch.testing.assert_close(plans.cpu(), expected.flatten(2))
        assert torch.equal(plans[:, 0].cpu(), mean_BHA.flatten(1)), "the mean itself competes"


def check_refit(device: str) -> None:
    for samples, elites, numbers in ((300, 30, 50), (7, 2, 3), (64, 8, 40), (16, 16, 5)):
        plans_BSN, cost_BS = torch.randn(3, samples, numbers), torch.randn(3, samples)
        cost_BS[1, 1] = torch.nan  # counts as the worst
        cost_BS[2], cost_BS[2, 3] = 1.0, -5.0  # ties: the first of them are elites
        mean, std = kernels.refit(plans_BSN.to(device), cost_BS.to(device), elites)
        order_BE = cost_BS.nan_to_num(nan=torch.inf).argsort(dim=1, stable=True)[:, :elites]
        elites_BEN = torch.take_along_dim(plans_BSN, order_BE.unsqueeze(2), dim=1)
        torch.testing.assert_close(mean.cpu(), elites_BEN.mean(1))
        torch.testing.assert_close(std.cpu(), elites_BEN.std(1))


CHECKS = {"noise": check_noise, "sample": check_sample, "refit": check_refit}


@pytest.mark.parametrize("name", CHECKS)
def test_interpreted(name: str, run_interpreted):
    run_interpreted(__file__, name)


@pytest.mark.cuda
@pytest.mark.parametrize("name", CHECKS)
def test_compiled(name: str):
    CHECKS[name]("cuda")


if __name__ == "__main__":
    torch.manual_seed(0)
    CHECKS[sys.argv[1]]("cpu")
