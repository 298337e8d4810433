"""The encoder's attention kernels against PyTorch's attention: interpreted on the CPU, or compiled on a GPU."""

import sys

import pytest
import torch
import torch.nn.functional as F

from lewm.kernels import attention as attention_kernels
from lewm.model.vit import SelfAttention


def expected(qkv: torch.Tensor, heads: int, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and the gradient of qkv, in double precision."""
    n, p, w = qkv.shape
    qkv = qkv.double().requires_grad_()
    q, k, v = qkv.view(n, p, 3, heads, w // 3 // heads).permute(2, 0, 3, 1, 4)
    out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, p, w // 3)
    return out.detach(), torch.autograd.grad(out, qkv, grad.double())[0]


def check(patches: int, tile: int, dtype: torch.dtype, tolerance: float, device: str = "cpu", width: int = 16) -> None:
    heads = 3
    qkv = 2 * torch.randn(2, patches + 1, 3 * heads * width)
    qkv[:, 0] *= 3  # the first token matters more, and less, than the others
    qkv = qkv.to(device, dtype)
    grad = torch.randn(2, patches + 1, heads * width).to(device, dtype)
    tiling = attention_kernels.Tiling(tile, tile, warps=4, stages=2)
    out, log_sums = attention_kernels.forward(qkv, heads, tiling)
    d_qkv, d_bias = attention_kernels.backward(grad, qkv, out, log_sums, heads, tiling)
    for found, wanted in zip((out, d_qkv), expected(qkv, heads, grad), strict=True):
        assert (found - wanted).abs().max() < tolerance * wanted.abs().max()
    sums = wanted.sum((0, 1))
    assert (d_bias - sums).abs().max() < tolerance * sums.abs().max()


# patches, patches of a tile, type, tolerance. The interpreter cannot multiply bfloat16.
INTERPRETED = ("16 16 float32 1e-5", "32 32 float32 1e-5", "64 16 float32 1e-5", "64 32 float16 5e-3")


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted(case: str, run_interpreted):
    run_interpreted(__file__, *case.split())


@pytest.mark.cuda
@pytest.mark.parametrize(("patches", "tile"), [(16, 16), (32, 32), (64, 64), (128, 64), (256, 64), (256, 128)])
def test_compiled(patches: int, tile: int):
    check(patches, tile, torch.bfloat16, 3e-2, "cuda", width=64)


@pytest.mark.cuda
@pytest.mark.parametrize("compiled", [False, True])
def test_a_layer_uses_them_and_has_the_gradients_of_one_that_does_not(compiled: bool):
    torch.manual_seed(0)
    layer = SelfAttention(192, 3).cuda()
    call = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    x = torch.randn(4, 257, 192, device="cuda")
    results = []
    for layer.fused in (True, False):
        with torch.autocast("cuda", torch.bfloat16):
            out = call(x)
        results.append((out, *torch.autograd.grad(out.float().square().sum(), list(layer.parameters()))))
    for fused, plain in zip(*results, strict=True):
        assert (fused - plain).norm() / plain.norm() < 2e-2
    assert not torch.equal(results[0][0], results[1][0]), "one of the two did not take its own path"


@pytest.mark.cuda
def test_equal_inputs_give_equal_gradients():
    qkv, grad = torch.randn(8, 257, 576, device="cuda").bfloat16(), torch.randn(8, 257, 192, device="cuda").bfloat16()
    out, log_sums = attention_kernels.forward(qkv, 3)
    first, second = (attention_kernels.backward(grad, qkv, out, log_sums, 3) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_only_narrow_numbers_on_a_gpu_are_supported():
    assert not attention_kernels.supports(torch.zeros(1, 257, 192), 3)
    assert not attention_kernels.supports(torch.zeros(1, 257, 192, dtype=torch.bfloat16), 3)


@pytest.mark.cuda
def test_only_powers_of_two_are_supported():
    assert attention_kernels.supports(torch.zeros(1, 257, 192, dtype=torch.bfloat16, device="cuda"), 3)
    assert not attention_kernels.supports(torch.zeros(1, 197, 192, dtype=torch.bfloat16, device="cuda"), 3)
    x = torch.zeros(1, 257, 192, device="cuda")
    assert not attention_kernels.supports(x, 3)
    with torch.autocast("cuda", torch.bfloat16):
        assert attention_kernels.supports(x, 3)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    patches, tile, dtype, tolerance = sys.argv[1:]
    check(int(patches), int(tile), getattr(torch, dtype), float(tolerance))
