"""The rollout in one kernel: its weights are cut up without loss, and it computes what the plain rollout does."""

import pytest
import torch

from lewm.config import EncoderConfig
from lewm.kernels.rollout_cluster import MOST_WAVES, ClusterRollout, as_fragments, supports
from lewm.kernels.rollout_fast import FastRollout
from lewm.methods.lewm import LeWM, LeWMConfig


@pytest.mark.parametrize("columns", [192, 256, 384])
def test_fragments_hold_each_number_where_tensor_cores_look_for_it(columns: int):
    weight = torch.arange(48 * columns, dtype=torch.float32).view(48, columns)
    fragments = as_fragments(weight).view(3, 8, -1)  # slice, warp
    tiles = columns // 64
    for piece, warp, tile, lane, number in (
        (0, 0, 0, 0, 0),
        (1, 3, 1, 13, 2),
        (2, 7, tiles - 1, 31, 3),
        (2, 5, 0, 6, 1),
    ):
        g, t = divmod(lane, 4)
        row = piece * 16 + (number // 2) * 8 + 2 * t + number % 2
        column = (warp * tiles + tile) * 8 + g
        paired = tile < tiles // 2 * 2
        place = (tile // 2 * 256 + lane * 8 + tile % 2 * 4) if paired else (tile * 128 + lane * 4)
        assert fragments[piece, warp, place + number] == weight[row, column]
    assert fragments.flatten().sort().values.equal(weight.flatten())


@pytest.fixture(scope="module")
def model() -> LeWM:
    """The full-size predictor behind a small encoder, with no weight or statistic left trivial."""
    model = LeWM(LeWMConfig(EncoderConfig(image_size=28, depth=1))).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            is_variance = name.endswith("running_var")
            tensor.copy_(noise.square() + 0.5 if is_variance else noise * (0.3 if tensor.ndim == 1 else 0.05))
    return model.cuda()


CASES = [(1, 300, 1, 5), (1, 300, 2, 5), (2, 300, 3, 6), (3, 7, 1, 4), (1, 1, 1, 5), (1, 40, 3, 1), (1, 300, 1, 1)]


@pytest.mark.cuda(9)
@pytest.mark.parametrize(("environments", "samples", "context", "horizon"), CASES)
def test_it_is_as_exact_as_bfloat16_allows(model, environments, samples, context, horizon):
    torch.manual_seed(0)
    z = torch.randn(environments, context, 192, device="cuda")
    past = torch.randn(environments, context - 1, 10, device="cuda")
    actions = torch.randn(environments, samples, horizon, 10, device="cuda")
    rollout, expected = ClusterRollout(model), FastRollout(model)(z, past, actions)
    result = rollout(z, past, actions)
    assert ((result - expected).abs().max() / expected.abs().max()) < 6e-3
    assert torch.equal(result, rollout(z, past, actions)), "sums are added in a fixed order"


@pytest.mark.cuda(9)
def test_too_many_candidates_take_the_other_way(model):
    rollout = ClusterRollout(model)
    z = torch.randn(1, 1, 192, device="cuda")
    actions = torch.randn(1, (MOST_WAVES + 1) * 500, 2, 10, device="cuda")
    expected = FastRollout(model)(z, z.new_zeros(1, 0, 10), actions)
    assert ((rollout(z, z.new_zeros(1, 0, 10), actions) - expected).abs().max() / expected.abs().max()) < 6e-3


@pytest.mark.cuda(9)
def test_it_is_what_a_planner_gets(model):
    assert supports(model)
    assert isinstance(model.planning_rollout("bf16"), ClusterRollout)
