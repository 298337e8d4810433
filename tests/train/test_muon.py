"""Muon steps along orthogonal matrices, of the size that AdamW's steps have, and leaves AdamW what is not a matrix."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lewm.checkpoint import read_tensors, write_tensors
from lewm.config import TrainConfig
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.train.muon import MuonAdamW, orthogonalise
from lewm.train.optim import load_optimizer_tensors, make_optimizer, optimizer_tensors, set_learning_rate

SHAPES = [(16, 48), (48, 16), (32, 32)]


def some(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def root_mean_square(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item()


def orthonormal(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Three matrices with orthonormal columns."""
    return torch.linalg.qr(some(3, rows, columns, seed=seed)).Q


def debug_model(seed: int = 0) -> LeWM:
    torch.manual_seed(seed)
    return LeWM(preset("debug").method)


def muon(matrices: list[nn.Parameter], others: list[nn.Parameter], **settings: float) -> MuonAdamW:
    """An optimiser as ``make_optimizer`` makes it, of plain parameters."""
    groups = [
        {"params": parameters, "share": 1.0, "clip": "", "muon": by_muon}
        for by_muon, parameters in ((False, others), (True, matrices))
        if parameters
    ]
    return MuonAdamW(groups, **settings)


# -- orthogonalisation ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_singular_values_come_near_1_and_singular_vectors_stay(shape: tuple[int, int], size: float):
    """For matrices U S V^T whose largest singular value is 50 times the smallest, whatever their size."""
    rank = min(shape)
    left, right = orthonormal(shape[0], rank, seed=1), orthonormal(shape[1], rank, seed=2)
    singular_values = size * torch.stack([torch.linspace(1, 0.02, rank) for _ in range(3)])
    found = orthogonalise((left * singular_values[:, None]) @ right.mT)
    assert found.shape == (3, *shape)
    core = left.mT @ found @ right  # diagonal, if the vectors are the same
    values = core.diagonal(dim1=1, dim2=2)
    assert ((values > 0.6) & (values < 1.3)).all()
    assert (core - torch.diag_embed(values)).abs().max() < 1e-4
    assert (left @ core @ right.mT - found).abs().max() < 1e-4  # nothing beside them
    cosine = nn.functional.cosine_similarity(found.flatten(1), (left @ right.mT).flatten(1))
    assert (cosine > 0.97).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_orthogonalised_each_for_itself(shape: tuple[int, int]):
    several = some(4, *shape) * torch.tensor([1e-3, 1.0, 10.0, 0.0])[:, None, None]
    for one, found in zip(several, orthogonalise(several), strict=True):
        torch.testing.assert_close(found, orthogonalise(one[None])[0])
    assert found.abs().max() == 0  # no gradient, no step


# -- the step -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_a_step_has_the_size_that_adamws_usually_have(shape: tuple[int, int]):
    """An orthogonal matrix has min(shape) singular values of 1, which is also the sum of its squared elements. So
    their root mean square is sqrt(min / (rows * columns)) = 1 / sqrt(max), and times 0.2 sqrt(max) it is 0.2. Singular
    values here are between 0.68 and 1.2."""
    matrix = nn.Parameter(torch.zeros(shape))
    optimizer = muon([matrix], [], lr=0.01, weight_decay=0.0)
    for number in range(3):
        before = matrix.detach().clone()
        matrix.grad = 1e-3 * some(*shape, seed=number)  # its size does not matter
        optimizer.step()
        step = matrix.detach() - before
        assert 0.65 < root_mean_square(step) / (0.2 * 0.01) < 1.2
        assert (step * matrix.grad).sum() < 0


@pytest.mark.parametrize("shape", SHAPES)
def test_matrices_are_stepped_as_by_torchs_muon(shape: tuple[int, int]):
    """Momentum, look-ahead, scale and weight decay are those of ``torch.optim.Muon``, which rounds to bfloat16."""
    ours, theirs = (nn.Parameter(0.01 * some(*shape, seed=9)) for _ in range(2))
    settings = {"lr": 0.01, "weight_decay": 0.5}
    optimizers = (
        muon([ours], [], **settings),
        torch.optim.Muon([{"params": [theirs], "share": 1.0}], **settings, adjust_lr_fn="match_rms_adamw"),
    )
    for number in range(6):
        for optimizer in optimizers:
            set_learning_rate(optimizer, 0.01 / (1 + number))
        ours.grad, theirs.grad = (some(*shape, seed=number) for _ in range(2))
        for optimizer in optimizers:
            optimizer.step()
    assert (ours - theirs).norm() < 0.03 * theirs.norm()


def test_the_others_are_stepped_as_by_adamw():
    ours, theirs = (nn.Parameter(some(7)) for _ in range(2))
    matrix = nn.Parameter(some(4, 3))
    optimizers = (muon([matrix], [ours], lr=0.1, weight_decay=0.5), torch.optim.AdamW([theirs], 0.1, weight_decay=0.5))
    for number in range(4):
        ours.grad, theirs.grad = (some(7, seed=number) for _ in range(2))
        matrix.grad = some(4, 3, seed=number)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(ours, theirs)
    assert len(optimizers[0].param_groups) == 2


def test_matrices_of_one_shape_do_not_mix():
    """They are stepped together, and go where each would have gone alone."""
    together = [nn.Parameter(some(6, 4, seed=i)) for i in range(3)]
    alone = [nn.Parameter(some(6, 4, seed=i)) for i in range(3)]
    optimizers = [muon(together, [], lr=0.1), *(muon([matrix], [], lr=0.1) for matrix in alone)]
    for number in range(3):
        for i, pair in enumerate(zip(together, alone, strict=True)):
            for matrix in pair:
                matrix.grad = 10.0**i * some(6, 4, seed=10 * number + i)
        for optimizer in optimizers:
            optimizer.step()
    for matrix, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(matrix, expected)


def test_weight_decay_shrinks_a_matrix_without_a_slope():
    flat, unused = nn.Parameter(some(5, 3)), nn.Parameter(some(5, 3))
    optimizer = muon([flat, unused], [], lr=0.1, weight_decay=0.5)
    flat.grad = torch.zeros(5, 3)
    for _ in range(2):
        optimizer.step()
    torch.testing.assert_close(flat.detach(), some(5, 3) * 0.95**2)
    assert torch.equal(unused, some(5, 3))  # no gradient at all: not part of the loss


# -- a whole model --------------------------------------------------------------------------------------------


def test_matrices_of_blocks_are_muons_and_all_others_adamws():
    model = debug_model()
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", lr=0.5, weight_decay=0.25))
    others, matrices = ([names[p] for p in group["params"]] for group in optimizer.param_groups)
    blocks = [*model.encoder.blocks, *model.predictor.blocks]
    linear = [module for block in blocks for module in block.modules() if isinstance(module, nn.Linear)]
    assert sorted(matrices) == sorted(names[module.weight] for module in linear)
    assert len(matrices) == 4 + 5
    assert sorted(others + matrices) == sorted(names.values())  # each exactly once
    for part in ("cls_token", "positions", "patches", "norm", "bias", "projector", "action_embedder"):
        assert any(part in name for name in others), part
        assert not any(part in name for name in matrices), part
    for group in optimizer.param_groups:
        assert (group["lr"], group["weight_decay"]) == (0.5, 0.25)


def test_muon_continues_from_disk_as_if_never_stopped(tmp_path: Path):
    config = TrainConfig(optimizer="muon", lr=0.01)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
        for i, parameter in enumerate(model.parameters()):
            parameter.grad = some(*parameter.shape, seed=100 * number + i)
        optimizer.step()

    model, copy, forgetful = (debug_model() for _ in range(3))
    optimizer = make_optimizer(model, config)
    for number in range(3):
        step(model, optimizer, number)
    path = tmp_path / "optimizer.safetensors"
    write_tensors(path, optimizer_tensors(optimizer, model))
    tensors = read_tensors(path)
    kept = {
        name: {key.rsplit("/", 1)[1] for key in tensors if key.startswith(f"{name}/")} for name in model.state_dict()
    }
    assert kept["encoder.blocks.0.mlp.0.weight"] == {"momentum"}
    assert kept["encoder.blocks.0.mlp.0.bias"] == {"step", "exp_avg", "exp_avg_sq"}

    for other in (copy, forgetful):
        other.load_state_dict(model.state_dict())
    restored = make_optimizer(copy, config)
    load_optimizer_tensors(restored, copy, tensors, path)
    for one, its_optimizer in ((model, optimizer), (copy, restored), (forgetful, make_optimizer(forgetful, config))):
        step(one, its_optimizer, 3)
    again = optimizer_tensors(restored, copy)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(value, again[key]) for key, value in optimizer_tensors(optimizer, model).items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), copy.parameters(), strict=True))
    # The state matters: without it the same step leads elsewhere.
    for a, b in zip(model.predictor.parameters(), forgetful.predictor.parameters(), strict=True):
        assert not torch.equal(a, b)
