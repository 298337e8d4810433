"""The fused MLP against the plain one: in Triton's interpreter on the CPU, compiled on a GPU, for which it must fit."""

import itertools
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lewm.kernels import mlp as mlp_kernels
from lewm.kernels.mlp import FEWEST_ROWS, Tiling, _arguments, choose_tilings, fused_mlp, supports, worthwhile


def plain_mlp(x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return F.linear(F.gelu(F.linear(x, w1, b1)), w2, b2)


def make_inputs(shape: tuple[int, ...], hidden: int, device: str = "cpu", scale: float = 1.0) -> list[Tensor]:
    """x and float32 parameters; hidden units come out at about ``scale``, GELU's bend for one and its ends for five."""
    generator = torch.Generator().manual_seed(0)
    width = shape[-1]
    shapes = shape, (hidden, width), (hidden,), (width, hidden), (width,)
    scales = 1.0, scale * width**-0.5, 0.5, hidden**-0.5, 0.5
    tensors = [size * torch.randn(s, generator=generator) for s, size in zip(shapes, scales, strict=True)]
    return [t.to(device).requires_grad_() for t in tensors]


def value_and_gradients(function, inputs: list[Tensor], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """A function of the inputs, of which x comes in a precision, and the gradients of its sum with random weights."""
    y = function(inputs[0].to(dtype), *inputs[1:])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return [y, *torch.autograd.grad(y, inputs, dy)]


def errors(results: list[Tensor], expected: list[Tensor]) -> list[float]:
    """The largest error in each, relative to the largest number in it."""
    assert [r.shape for r in results] == [e.shape for e in expected]
    return [float((r - e).abs().max() / e.abs().max()) for r, e in zip(results, expected, strict=True)]


# Width, hidden units, type and tolerance. The interpreter cannot multiply bfloat16; float16 shows that narrow types get
# through.
CASES = [(192, 128, torch.float32, 1e-5), (64, 192, torch.float32, 1e-5), (384, 64, torch.float32, 1e-5)]
CASES += [(128, 128, torch.float16, 5e-3)]


def check_values() -> None:
    """Tiles of 16 rows: 21 rows leave the last one partly empty."""
    for (width, hidden, dtype, tolerance), scale in itertools.product(CASES, (1.0, 5.0)):
        inputs = make_inputs((3, 7, width), hidden, scale=scale)
        expected = value_and_gradients(plain_mlp, inputs)
        found = errors(value_and_gradients(fused_mlp, inputs, dtype), expected)
        assert max(found) < tolerance, f"{width} x {hidden} in {dtype}, scale {scale}: {found}"


def check_gradients_twice() -> None:
    x, *parameters = make_inputs((21, 64), 128)
    y = fused_mlp(x, *parameters)
    first = torch.autograd.grad(y.square().sum(), [x, *parameters], retain_graph=True)
    second = torch.autograd.grad(y.square().sum(), [x, *parameters])
    assert all(map(torch.equal, first, second))


def check_precisions() -> None:
    """Autocast decides for the computation; gradients are in the precision of what they belong to."""
    x, *parameters = make_inputs((21, 64), 128)
    with torch.autocast("cpu", torch.float16):
        y = fused_mlp(x, *parameters)
    assert y.dtype == torch.float16
    assert {g.dtype for g in torch.autograd.grad(y.float().sum(), [x, *parameters])} == {torch.float32}


def check_compiled() -> None:
    """``fullgraph`` raises if there is a break; the rows' strides and the sum's expanded gradient are awkward ones."""
    inputs = make_inputs((64, 21), 128)[:1] + make_inputs((21, 64), 128)[1:]

    def loss(x: Tensor, *parameters: Tensor) -> Tensor:
        return fused_mlp(x.t(), *parameters).sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    plain = torch.autograd.grad(plain_mlp(inputs[0].t(), *inputs[1:]).sum(), inputs)
    assert max(errors(list(torch.autograd.grad(compiled(*inputs), inputs)), list(plain))) < 1e-5


def check_operators() -> None:
    """PyTorch's own checks of operators: shapes that are promised, no hidden aliasing or mutation, gradients traced."""
    x, w1, b1, w2, b2 = make_inputs((21, 64), 128)
    torch.library.opcheck(mlp_kernels._mlp_forward, (x, w1, b1, w2, b2))
    h = F.linear(x, w1, b1).detach()
    torch.library.opcheck(mlp_kernels._mlp_backward, tuple(t.detach() for t in (x, h, w1, w2)))


CHECKS = ["check_values", "check_gradients_twice check_precisions", "check_compiled check_operators"]


@pytest.mark.parametrize("checks", CHECKS)
def test_interpreted_kernels_compute_what_the_plain_mlp_does(checks: str, run_interpreted):
    run_interpreted(__file__, *checks.split())


@pytest.mark.parametrize("width", [192, 384])
def test_kernels_fit_a_hopper(width: int, tmp_path, compile_for_hopper):
    """Their tiles fit its shared memory and registers, and are multiplied by its own instructions."""
    triton = pytest.importorskip("triton")
    forward, backward = choose_tilings(width)
    kernels = {
        mlp_kernels.forward_kernel: _arguments(width, 4 * width, forward),
        mlp_kernels.backward_kernel: _arguments(width, 4 * width, backward) | {"PART": backward.part},
    }
    types = {"rows": "i32"} | dict.fromkeys(("b1", "b2", "db1", "db2"), "*fp32")
    for kernel, constants in kernels.items():
        tensors = {name: types.get(name, "*bf16") for name in kernel.arg_names if name not in constants}
        compiled = compile_for_hopper(kernel, tensors, constants)
        assert compiled.metadata.shared <= 227 * 1024
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        (tmp_path / "cubin").write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", tmp_path / "cubin"]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "STACK:0 " in usage, "registers are spilled"


def test_widths_that_divide_into_tiles_are_supported():
    pytest.importorskip("triton")
    assert all(supports(width, hidden) for width, hidden in ((192, 768), (64, 64), (384, 1536)))
    assert not any(supports(width, hidden) for width, hidden in ((96, 768), (192, 100), (448, 64), (0, 64), (64, 0)))
    assert not supports(192, 768, torch.device("cpu"))


def test_without_triton_nothing_is_supported(monkeypatch):
    monkeypatch.setattr(mlp_kernels, "triton", None)
    assert not supports(192, 768)


def test_the_kernels_are_for_training_steps(monkeypatch):
    pytest.importorskip("triton")
    x = torch.zeros(FEWEST_ROWS // 64, 64, 192, dtype=torch.bfloat16)
    assert not worthwhile(x, 768), "there is no GPU"
    monkeypatch.setattr(mlp_kernels, "is_hopper", lambda _: True)
    assert worthwhile(x, 768)
    assert not worthwhile(x, 100)
    assert not worthwhile(x[1:], 768), "too few rows"
    assert not worthwhile(x.float(), 768)
    with torch.autocast("cpu", torch.bfloat16):
        assert worthwhile(x.float(), 768)
    with torch.no_grad():
        assert not worthwhile(x, 768)


@pytest.mark.cuda(9)
@pytest.mark.parametrize(("width", "hidden"), [(192, 768), (64, 192), (384, 1536)])
def test_compiled_kernels_are_as_exact_as_bfloat16_allows(width: int, hidden: int):
    inputs = make_inputs((3, 257, width), hidden, "cuda")
    expected = value_and_gradients(plain_mlp, inputs)

    def plain_in_bfloat16(x: Tensor, *parameters: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return plain_mlp(x, *parameters)

    assert supports(width, hidden, inputs[0].device)
    results = value_and_gradients(fused_mlp, inputs, torch.bfloat16)
    allowed = errors(value_and_gradients(plain_in_bfloat16, inputs, torch.bfloat16), expected)
    assert all(error < 1.5 * a + 1e-3 for error, a in zip(errors(results, expected), allowed, strict=True))
    again = value_and_gradients(fused_mlp, inputs, torch.bfloat16)
    assert all(map(torch.equal, results, again)), "sums are added in a fixed order"


@pytest.mark.cuda(9)
def test_a_compiled_and_captured_step_follows_its_inputs():
    inputs = make_inputs((3, 257, 192), 768, "cuda")
    x = inputs[0].detach().bfloat16().requires_grad_()
    compiled = torch.compile(fused_mlp, fullgraph=True, dynamic=False)

    def step(function) -> tuple[Tensor, ...]:
        return torch.autograd.grad(function(x, *inputs[1:]).float().square().sum(), [x, *inputs[1:]])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(compiled)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(compiled)
    x.data.neg_()
    graph.replay()
    assert max(errors(list(captured), list(step(fused_mlp)))) < 1e-2


if __name__ == "__main__":
    torch.set_num_threads(1)
    mlp_kernels.choose_tilings = lambda _: (Tiling(16, 64, 4, 2, part=8),) * 2
    for check in sys.argv[1:]:
        globals()[check]()
