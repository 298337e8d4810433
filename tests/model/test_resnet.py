"""ResNet-18: the network of torchvision, and a model that has it trains, continues, compiles and plans as any other."""

from __future__ import annotations

import copy
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch._dynamo.utils
from torch import nn

import lewm
from lewm import checkpoint
from lewm.config import Config, EncoderConfig
from lewm.methods.lewm import LeWM
from lewm.methods.registry import METHODS
from lewm.model.encoder import IMAGENET_MEAN, IMAGENET_STD, make_encoder
from lewm.model.projector import measuring
from lewm.model.resnet import ResNet18
from lewm.plan.planner import Planner
from lewm.presets import PRESETS, changed, preset
from lewm.train.compiled import Compilation, compile_parts
from lewm.train.distributed import SINGLE
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.step import PlainStep
from lewm.train.trainer import SilentMonitor
from lewm.types import ActionStats, Batch, DataFacts

STEPS = 6


def with_resnet(config: Config) -> Config:
    encoder = replace(config.method.encoder, kind="resnet18")
    return replace(config, method=replace(config.method, encoder=encoder))


SETTINGS = with_resnet(preset("debug")).method


def random_frames(*leading: int, size: int = 28) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (*leading, size, size, 3), dtype=torch.uint8, generator=generator)


def lively_model() -> LeWM:
    """As after some training: gates are open, and BatchNorms have seen something."""
    torch.manual_seed(0)
    model = LeWM(SETTINGS, DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0))))
    with torch.no_grad():
        for parameter in model.predictor.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(std=0.2)
                module.running_var.uniform_(0.5, 1.5)
    return model


# -- the network --------------------------------------------------------------------------------------------------


def test_it_has_the_parameters_of_torchvisions_without_its_classifier() -> None:
    encoder = make_encoder(EncoderConfig(kind="resnet18"))
    assert isinstance(encoder, ResNet18)
    assert sum(parameter.numel() for parameter in encoder.parameters()) == 11_176_512
    names = {name for name, _ in encoder.named_parameters()}
    assert {"conv1.weight", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight", "layer4.1.bn2.bias"} <= names
    assert len(names) == 60
    # Frames are normalised in the network; how is no part of its file.
    assert not [name for name in encoder.state_dict() if name.split(".")[-1] in ("scale", "shift")]


def theirs(encoder: ResNet18) -> nn.Module:
    """Hugging Face's ResNet-18 with the same numbers."""
    transformers = pytest.importorskip("transformers", reason="the network to compare with comes with `make test`")
    sizes = {"embedding_size": 64, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2]}
    other = transformers.ResNetModel(transformers.ResNetConfig(**sizes, layer_type="basic", hidden_act="relu"))
    ours = encoder.state_dict()
    # Of a block with a shortcut, theirs names the shortcut first.
    order = sorted(ours, key=lambda name: name.rsplit(".", 3)[0] if "downsample" in name else name.rsplit(".", 2)[0])
    assert len(order) == len(other.state_dict())
    renamed = {}
    for name in other.state_dict():
        place = name.replace("embedder.embedder.", "").replace("normalization", "bn").replace("convolution", "conv")
        place = place.replace("encoder.stages.", "layer").replace(".layers.", ".").replace(".layer.", ".")
        parts = place.split(".")
        if parts[0].startswith("layer"):
            stage, block, rest = int(parts[0].removeprefix("layer")) + 1, parts[1], parts[2:]
            if rest[0] == "shortcut":
                inner = f"downsample.{'0' if rest[1] == 'conv' else '1'}"
            else:
                inner = f"{rest[1]}{int(rest[0]) + 1}"
            place = f"layer{stage}.{block}.{inner}.{rest[-1]}"
        else:
            place = f"{parts[0]}1.{parts[-1]}"
        renamed[name] = ours[place]
    assert len({id(tensor) for tensor in renamed.values()}) == len(ours)
    other.load_state_dict(renamed)
    return other.double().train(encoder.training)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("size", [28, 64, 224])
def test_it_computes_what_hugging_faces_does(training: bool, size: int) -> None:
    torch.manual_seed(0)
    encoder = ResNet18().double().train(training)  # a batch of few frames magnifies rounding
    for name, buffer in encoder.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_(std=0.3)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5)
    frames = random_frames(12, size=size)
    pixels = (frames.double() / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    with torch.no_grad():
        expected = theirs(encoder)(pixels.movedim(-1, 1)).pooler_output.flatten(1)
        found = encoder(frames)
    assert found.shape == (12, 512)
    assert expected.std(0).mean() > 0.01  # the frames are told apart, so agreement means something
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", PRESETS)
@pytest.mark.parametrize("method", [name for name in METHODS if hasattr(preset("debug", name).method, "encoder")])
def test_one_flag_chooses_it_in_every_world(world: str, method: str) -> None:
    """What is said of a ViT's patches, as that some are left out, means nothing to it."""
    config = changed(preset(world, method), {"method.encoder.kind": "resnet18"})
    encoder = config.method.encoder
    assert encoder.out_width == 512
    assert "patches" not in encoder.title
    assert not config.method.needs_background
    assert EncoderConfig(image_size=100, kind="resnet18").out_width == 512  # nor must they divide a frame


# -- calibration --------------------------------------------------------------------------------------------------


def test_measured_statistics_are_those_of_the_data() -> None:
    """Mean over batches of each one's, for every BatchNorm, as its inputs are when all are normalised so."""
    torch.manual_seed(0)
    encoder = ResNet18().eval()
    batches = [random_frames(6), 255 - random_frames(10) // 2]
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def note(name: str, x: torch.Tensor) -> None:
        variance, mean = torch.var_mean(x.double(), dim=(0, 2, 3))
        seen.setdefault(name, []).append((mean, variance))

    norms = {name: module for name, module in encoder.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert len(norms) == 20
    before = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    with torch.no_grad():
        in_training = [copy.deepcopy(encoder).train()(batch) for batch in batches]
        hooks = [
            norm.register_forward_pre_hook(lambda _, inputs, name=name: note(name, inputs[0]))
            for name, norm in norms.items()
        ]
        with measuring(encoder):
            found = [encoder(batch) for batch in batches]
        for hook in hooks:
            hook.remove()
    for one, other in zip(found, in_training, strict=True):
        torch.testing.assert_close(one, other)  # each batch is normalised by itself, as in training
    for name, norm in norms.items():
        means, variances = (torch.stack(parts).mean(0).float() for parts in zip(*seen[name], strict=True))
        torch.testing.assert_close(norm.running_mean, means, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(norm.running_var, variances, rtol=1e-4, atol=1e-5)
    changed = {name for name, tensor in encoder.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {f"{name}.{moment}" for name in norms for moment in ("running_mean", "running_var")}
    assert not encoder.training


def test_what_goes_wrong_while_measuring_leaves_the_network_usable() -> None:
    encoder, frames = ResNet18().eval(), random_frames(2)
    with torch.no_grad():
        expected = encoder(frames)
        with pytest.raises(RuntimeError, match="channels"), measuring(encoder):
            encoder.layer2(torch.zeros(2, 3, 8, 8))
        assert torch.equal(encoder(frames), expected)


@torch.no_grad()
def test_calibration_sets_every_batchnorm_of_a_model() -> None:
    """In evaluation the encoder then does to the data what it does in training; before it did something else."""
    model, frames = lively_model(), random_frames(160)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def error() -> float:
        in_training = copy.deepcopy(model.encoder).train()(frames)
        return float((model.eval().encoder(frames) - in_training).norm() / in_training.norm())

    assert error() > 0.3
    batch = Batch(torch.randn(40, 4, 5, 2, generator=torch.Generator().manual_seed(2)), frames.unflatten(0, (40, 4)))
    model.calibrate([batch, batch])
    assert error() < 0.05
    changed = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if name.endswith(("running_mean", "running_var"))}
    assert len(changed) == 2 * (20 + 2)
    assert not any(module.training for module in model.modules())


# -- a model that has it ------------------------------------------------------------------------------------------


class Stop(SilentMonitor):
    def __init__(self, step: int) -> None:
        self.when = step

    def step(self, step: int, total: int, values: dict[str, float]) -> None:  # noqa: ARG002
        if step == self.when:
            signal.raise_signal(signal.SIGTERM)


def of_few_steps(config: Config, out: Path) -> Config:
    settings = replace(config.train, steps=STEPS, checkpoint_every=4, calibration_batches=2)
    return replace(with_resnet(config), out=out, train=settings)


def saved_tensors(run: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.resolve(run)
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


@pytest.fixture(scope="module")
def trained(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("resnet") / "run"
    result = train(of_few_steps(debug_config, out))
    assert isinstance(result.model, LeWM)
    assert isinstance(result.model.encoder, ResNet18)
    return out


def test_its_weights_and_statistics_learn(trained: Path) -> None:
    found = saved_tensors(trained)
    torch.manual_seed(0)
    fresh = LeWM(SETTINGS).state_dict()
    for name in ("encoder.conv1.weight", "encoder.layer4.1.conv2.weight", "encoder.layer2.0.downsample.1.weight"):
        assert not torch.equal(found[name], fresh[name]), name
    assert found["encoder.bn1.running_var"].sub(1).abs().max() > 1e-3
    assert all(np.isfinite(row["loss"]) for row in read_metrics(trained / "metrics.jsonl") if "loss" in row)


@pytest.mark.parametrize("step", [3, 4])
def test_a_stopped_run_continues_to_the_same_weights(
    debug_config: Config, trained: Path, tmp_path: Path, step: int
) -> None:
    config = of_few_steps(debug_config, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        train(config, monitor=Stop(step))
    assert checkpoint.resolve(tmp_path / "run").name == f"step_{step:07d}"
    train(config)
    one, other = saved_tensors(tmp_path / "run"), saved_tensors(trained)
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def test_it_is_loaded_and_plans(trained: Path) -> None:
    model = lewm.load(trained, device="cpu")
    frames = random_frames(2).numpy()
    plan = Planner(model, config=preset("debug").plan).plan(frames[0], frames[1])
    assert plan.actions.shape == (10, 2)
    assert np.isfinite(plan.actions).all()
    assert np.isfinite(plan.distances).all()


def test_compiled_it_does_the_same_without_breaks_or_recompilation() -> None:
    """The encoder is one graph; beside it there are a predictor's block and the characteristic function."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    config = with_resnet(preset("debug"))
    predictor = replace(config.method.predictor, dropout=0.0)
    config = replace(config, method=replace(config.method, predictor=predictor))
    torch.manual_seed(0)
    model = LeWM(config.method, DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0))))
    other = copy.deepcopy(model)
    fast = compile_parts(model, backend="aot_eager")
    before = copy.deepcopy(model.state_dict())
    assert Compilation(fast, replace(config, train=replace(config.train, compile="on"))).wait() > 0
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name  # compiling leaves no trace in the model
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3

    batch = Batch(torch.randn(4, 4, 5, 2, generator=torch.Generator().manual_seed(3)), random_frames(4, 4))
    steps = [
        PlainStep(m, torch.optim.SGD([{"params": list(p.parameters()), "clip": ""}], lr=0.01), config.train, SINGLE)
        for m, p in ((fast, model), (other, other))
    ]
    for number in range(3):
        one, two = (step(batch, other.draws(0, number, other.device)).losses.total for step in steps)
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=name)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3
