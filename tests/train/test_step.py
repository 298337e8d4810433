"""One step: what it does to the weights, and the compiled parts that do the same."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch._dynamo.utils

from lewm.config import Config
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.train.compiled import Compilation, compile_parts, wants_compiling
from lewm.train.distributed import SINGLE
from lewm.train.optim import make_optimizer
from lewm.train.step import PlainStep
from lewm.types import ActionStats, Batch, DataFacts

CPU = torch.device("cpu")


def deeper_without_dropout(config: Config) -> Config:
    encoder, predictor = config.method.encoder, config.method.predictor
    encoder, predictor = replace(encoder, depth=4), replace(predictor, depth=3, dropout=0.0)
    return replace(config, method=replace(config.method, encoder=encoder, predictor=predictor))


CONFIG = deeper_without_dropout(preset("debug"))


def new_model(kept_patches: int = 0) -> LeWM:
    torch.manual_seed(0)
    encoder = replace(CONFIG.method.encoder, kept_patches=kept_patches)
    model = LeWM(replace(CONFIG.method, encoder=encoder), DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0))))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def model() -> LeWM:
    return new_model()


@pytest.fixture
def batch() -> Batch:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (4, 4, 28, 28, 3), dtype=torch.uint8, generator=generator)
    return Batch(torch.randn(4, 4, 5, 2, generator=generator), pixels)


def plain_step(model: LeWM, clip_norm: float = 1.0) -> PlainStep:
    settings = replace(CONFIG.train, clip_norm=clip_norm)
    return PlainStep(model, make_optimizer(model, settings), settings, SINGLE)


def descent(model: LeWM) -> torch.optim.SGD:
    """Plain gradient descent, which does not magnify rounding as AdamW does."""
    return torch.optim.SGD([{"params": list(model.parameters()), "clip": ""}], lr=0.01)


def test_the_gradient_is_clipped(model: LeWM, batch: Batch) -> None:
    plain_step(model, clip_norm=0.01)(batch, model.draws(0, 0, CPU))
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_results_keep_no_graph_alive(model: LeWM, batch: Batch) -> None:
    losses = plain_step(model)(batch, model.draws(0, 0, CPU)).losses
    assert losses.embeddings is not None
    assert losses.terms.keys() == {"prediction", "sigreg"}
    assert not any(t.requires_grad for t in (losses.total, *losses.terms.values(), losses.embeddings))


@pytest.mark.parametrize(("kept_patches", "graphs"), [(0, 6), (2, 5)])
def test_compiled_parts_do_the_same_without_breaks_or_recompilation(
    batch: Batch, kept_patches: int, graphs: int
) -> None:
    """Traced as on a GPU, but run by torch's own operators: generating code takes minutes on a CPU.

    A predictor's block and the characteristic function are compiled once. Of the encoder four parts are compiled:
    what is before the blocks, the first, those between, and the last with what follows. Without background the first
    is like those between: every frame has positions of its own.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = new_model(kept_patches)
    other = copy.deepcopy(model)
    settings = replace(CONFIG.train, compile="on")
    fast = compile_parts(model, backend="aot_eager")
    before = copy.deepcopy(model.state_dict())
    assert Compilation(fast, replace(CONFIG, train=settings)).wait() > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # compiling leaves no trace in the model
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs

    optimizers = [descent(original) for original in (model, other)]
    for number in range(4):
        results = [
            PlainStep(m, optimizer, settings, SINGLE)(batch, other.draws(0, number, CPU))
            for m, optimizer in zip((fast, other), optimizers, strict=True)
        ]
        torch.testing.assert_close(results[0].losses.total, results[1].losses.total)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert model.state_dict().keys() == other.state_dict().keys()  # the original is not wrapped


def test_an_error_while_compiling_is_not_lost(model: LeWM) -> None:
    model.inputs = replace(model.inputs, action_dim=3)
    with pytest.raises(RuntimeError, match=r"size|shape|match"):
        Compilation(model, CONFIG).wait()


def test_where_steps_are_compiled() -> None:
    settings, gpu = CONFIG.train, torch.device("cuda")
    assert wants_compiling(settings, gpu)
    assert not wants_compiling(settings, CPU)
    assert wants_compiling(replace(settings, compile="on"), CPU)
    assert not wants_compiling(replace(settings, compile="off"), gpu)


def test_only_the_compilers_remarks_are_kept_from_the_user(model: LeWM) -> None:
    remarks = (
        "\nOnline softmax is disabled on the fly since Inductor decides to\nsplit the reduction.",
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled.",
    )
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        compile_parts(model, backend="aot_eager")
        for text in (*remarks, "something is wrong"):
            warnings.warn_explicit(text, UserWarning, "compile_fx.py", 1, module="torch._inductor.compile_fx")
        warnings.warn_explicit(remarks[1], UserWarning, "mine.py", 1, module="mine")
    assert [str(warning.message) for warning in shown] == ["something is wrong", remarks[1]]
