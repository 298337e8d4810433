"""The fused kernels against the plain rollout: in Triton's interpreter on the CPU, compiled on a GPU."""

import sys

import pytest
import torch

from lewm.config import EncoderConfig, PredictorConfig
from lewm.kernels.rollout_fast import FastRollout
from lewm.kernels.rollout_tiling import Tiling
from lewm.kernels.rollout_triton import TritonRollout, supports
from lewm.methods.lewm import LeWM, LeWMConfig


def make_model(device: str = "cpu") -> LeWM:
    """A small model of the width that the kernels are written for, with no weight or statistic left trivial."""
    encoder = EncoderConfig(image_size=14, depth=1, heads=1, width=8, mlp_width=8)
    predictor = PredictorConfig(depth=2, heads=2, mlp_width=128)
    model = LeWM(LeWMConfig(encoder, predictor, projector_width=128)).eval()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            noise = torch.randn(tensor.shape, generator=generator)
            is_variance = name.endswith("running_var")
            tensor.copy_(noise.square() + 0.5 if is_variance else noise * (1.0 if tensor.ndim == 1 else 0.1))
    return model.to(device)


def make_inputs(context: int, device: str = "cpu", samples: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two environments; with four blocks ahead, the window grows and slides from every context."""
    generator = torch.Generator().manual_seed(context)
    z = torch.randn(2, context, 192, generator=generator)
    past = torch.randn(2, context - 1, 10, generator=generator)
    actions = torch.randn(2, samples, 4, 10, generator=generator)
    return z.to(device), past.to(device), actions.to(device)


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    assert result.shape == expected.shape
    assert result.dtype == torch.float32
    return float((result - expected).abs().max() / expected.abs().max())


def check_in_interpreter(context: int, groups: int, fused_rows: int, dtype: torch.dtype, tolerance: float) -> None:
    """Tiles of 16 rows: six candidates leave the last one partly empty, with one token each as with three."""
    model, inputs = make_model(), make_inputs(context)
    rollout = TritonRollout(model, dtype, lambda *_: Tiling(16, groups), fused_rows)
    assert relative_error(rollout(*inputs), FastRollout(model)(*inputs)) < tolerance


# Context, groups, rows up to which attention is one kernel (4 lies between the shared tokens and the candidates' own),
# type and tolerance. The interpreter cannot multiply bfloat16; float16 shows that narrow types get through.
CASES = ["1 2 99 float32 1e-5", "2 1 99 float32 1e-5", "3 2 99 float32 1e-5", "3 1 99 float16 5e-3"]
CASES += ["1 1 0 float32 1e-5", "2 2 0 float32 1e-5", "3 1 4 float32 1e-5", "3 2 0 float16 5e-3"]


@pytest.mark.parametrize("case", CASES)
def test_interpreted_kernels_compute_what_the_plain_rollout_does(case: str, run_interpreted):
    run_interpreted(__file__, *case.split())


@pytest.mark.cuda(9)
@pytest.mark.parametrize("samples", [3, 1500])
@pytest.mark.parametrize("context", [1, 2, 3])
def test_compiled_kernels_are_as_exact_as_bfloat16_allows(context: int, samples: int):
    model, inputs = make_model("cuda"), make_inputs(context, "cuda", samples)
    expected = FastRollout(model)(*inputs)
    assert supports(model)
    error = relative_error(TritonRollout(model)(*inputs), expected)
    assert error < 1.5 * relative_error(FastRollout(model, torch.bfloat16)(*inputs), expected)


@pytest.mark.cuda(9)
def test_a_captured_rollout_follows_its_inputs():
    rollout, inputs = TritonRollout(make_model("cuda")), make_inputs(1, "cuda")
    rollout(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = rollout(*inputs)
    inputs[2].neg_()
    for _ in range(2):  # The second replay finds the buffers as the first one left them.
        graph.replay()
        assert relative_error(result, rollout(*inputs)) < 1e-2


def test_a_model_on_the_cpu_is_not_supported():
    assert not supports(make_model())


if __name__ == "__main__":
    torch.set_num_threads(1)
    context, groups, fused_rows, dtype, tolerance = sys.argv[1:]
    check_in_interpreter(int(context), int(groups), int(fused_rows), getattr(torch, dtype), float(tolerance))
