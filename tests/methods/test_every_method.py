"""What every registered method promises the rest of the house."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import lewm
from lewm.checked import flat, to_dict
from lewm.config import MethodConfig
from lewm.errors import ConfigError
from lewm.methods.base import Method
from lewm.methods.registry import METHODS, method_config, read_settings
from lewm.presets import PRESETS, preset
from lewm.train.compiled import compile_parts
from lewm.train.distributed import Processes, share_batchnorm
from lewm.types import ALONE, ActionStats, Batch, DataFacts, Inputs, Losses, Peers

BATCH = 8
every_method = pytest.mark.parametrize("name", METHODS)


def settings_of(name: str) -> MethodConfig:
    """Of debug size, without dropout, which processes draw each for itself."""
    settings = preset("debug", name).method
    if hasattr(settings, "predictor"):
        settings = replace(settings, predictor=replace(settings.predictor, dropout=0.0))
    if hasattr(settings, "dropout"):
        settings = replace(settings, dropout=0.0)
    return settings


def build(name: str, seed: int = 0) -> Method:
    """As after some training: gates are open, and frames do not look alike."""
    torch.manual_seed(seed)
    method = settings_of(name).build(DataFacts(ActionStats((0.1, -0.2), (0.5, 2.0)), environment="lewm/TwoRoom-v0"))
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return method


def fake_batch(inputs: Inputs, size: int = BATCH) -> Batch:
    """What a method says that its windows hold, at random."""
    generator = torch.Generator().manual_seed(1)

    def frames(*shape: int) -> torch.Tensor:
        side = inputs.image_size or 28
        return torch.randint(0, 256, (*shape, side, side, 3), dtype=torch.uint8, generator=generator)

    actions = torch.randn(size, inputs.frames, inputs.frame_skip, inputs.action_dim, generator=generator)
    goals = {goal: frames(size) for goal in inputs.goals}
    steps = {goal: torch.randint(0, 40, (size,), generator=generator) for goal in inputs.goals}
    return Batch(actions, frames(size, inputs.frames), goals=goals, steps=steps)


def loss_of(method: Method, batch: Batch, peers: Peers = ALONE) -> Losses:
    return method.losses(batch, method.draws(3, 0, torch.device("cpu")), peers)


# -- settings ------------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("world", PRESETS)
def test_it_has_a_size_and_a_recipe_of_its_own_for_every_world(name: str, world: str):
    config = preset(world, name)
    assert name == config.method.NAME
    inputs = config.method.inputs()
    assert inputs.features or inputs.image_size == config.collect.resolution
    assert inputs.action_dim == PRESETS[world].action_dim
    assert config.train.warmup_steps < config.train.steps
    assert read_settings(json.loads(json.dumps(to_dict(config.method)))) == config.method


def test_no_method_inherits_anothers_recipe():
    recipes = {name: preset("tworoom", name).train for name in METHODS}
    assert recipes["pldm"].lr != recipes["lewm"].lr
    assert recipes["pldm"].optimizer != recipes["lewm"].optimizer


@every_method
def test_its_settings_are_explained_and_named_after_it(name: str):
    cls = method_config(name)
    files = {Path(sys.modules[base.__module__].__file__) for base in cls.__mro__ if is_dataclass(base)}
    files.add(Path(lewm.__file__).with_name("config.py"))
    for setting in fields(cls):
        if not is_dataclass(setting.default_factory):
            lines = [line for file in files for line in file.read_text().splitlines() if f" {setting.name}: " in line]
            assert any("#" in line for line in lines), f"--method.{setting.name} is not explained"
    assert flat(settings_of(name), "method.")["method.name"] == name


def test_a_method_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown method 'lewmm'\. Did you mean 'lewm'\?"):
        preset("debug", "lewmm")
    with pytest.raises(ConfigError, match=r"method\.name must be a text, got 3"):
        read_settings({"name": 3})
    with pytest.raises(TypeError, match="needs a NAME"):
        type("Nameless", (MethodConfig,), {})


# -- losses --------------------------------------------------------------------------------------------------------


@every_method
def test_its_loss_trains_all_that_it_says_is_trained(name: str):
    method = build(name).train()
    losses = loss_of(method, fake_batch(method.inputs))
    assert losses.total.shape == ()
    assert losses.total.isfinite()
    assert losses.terms
    assert all(term.shape == () for term in losses.terms.values())
    losses.total.backward()
    trained = [p for group in method.groups() for p in group.parameters]
    assert len(trained) == len(set(trained))
    assert set(trained) == {p for p in method.parameters() if p.requires_grad}
    assert all(p.grad is not None for p in trained)
    if losses.embeddings is not None:
        assert losses.embeddings.shape[:2] == (BATCH, method.inputs.frames)


class Waits(TorchDispatchMode):
    """Notes what would make a host wait for its device: such a step cannot be captured."""

    NAMES = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name
        by_mask = name == "aten::index" and any(getattr(each, "dtype", None) is torch.bool for each in args[1])
        if name in self.NAMES or by_mask:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


VARIANTS = {
    **{name: settings_of(name) for name in METHODS},
    "gcivl published": replace(settings_of("gcivl"), variant="published"),  # type: ignore[call-arg]
    "gciql published": replace(settings_of("gciql"), variant="published"),  # type: ignore[call-arg]
    "pldm original": replace(settings_of("pldm"), variant="original"),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("settings", VARIANTS.values(), ids=VARIANTS)
def test_nothing_in_a_step_waits_for_the_device(settings: MethodConfig):
    method = settings.build(DataFacts(ActionStats((0.1, -0.2), (0.5, 2.0)))).train()
    batch = fake_batch(method.inputs)
    loss_of(method, batch)  # the first time constants are put on the device
    with Waits() as waits:
        loss_of(method, batch).total.backward()
        method.after_step()
    assert waits.found == []
    with waits:
        assert batch.actions[batch.actions > 0].sum().item() > 0
    assert len(waits.found) >= 2, "it would have been seen"


@every_method
def test_its_draws_are_a_function_of_seed_and_step(name: str):
    method, cpu = build(name), torch.device("cpu")
    state = torch.get_rng_state()
    first = method.draws(5, 7, cpu)
    method.draws(5, 8, cpu)
    again = method.draws(5, 7, cpu)
    assert all(torch.equal(first[draw], again[draw]) for draw in first)
    other = method.draws(6, 7, cpu)
    assert not any(torch.equal(first[draw], other[draw]) for draw in first)
    assert torch.equal(torch.get_rng_state(), state)


@every_method
def test_a_compiled_view_is_the_same_function_of_the_same_parameters(name: str):
    method = build(name).train()
    fast = method.compiled(lambda part: part)
    assert {id(p) for p in fast.parameters()} == {id(p) for p in method.parameters()}
    batch = fake_batch(method.inputs)
    torch.testing.assert_close(loss_of(fast, batch).total, loss_of(method, batch).total)


@every_method
def test_it_compiles_without_breaks(name: str):
    torch._dynamo.reset()
    method = build(name).train()
    batch = fake_batch(method.inputs)
    expected = loss_of(copy.deepcopy(method), batch).total
    torch.testing.assert_close(loss_of(compile_parts(method, backend="aot_eager"), batch).total, expected)


@every_method
def test_calibration_leaves_it_ready_to_evaluate_and_changes_no_parameter(name: str):
    method = build(name).train()
    before = {key: p.clone() for key, p in method.named_parameters()}
    method.calibrate(iter([fake_batch(method.inputs), fake_batch(method.inputs, 5)]))
    assert all(torch.equal(p, before[key]) for key, p in method.named_parameters())


# -- files ---------------------------------------------------------------------------------------------------------


@every_method
def test_what_is_saved_is_what_is_loaded(name: str, tmp_path: Path):
    method = build(name).eval()
    method.save_pretrained(tmp_path / "model")
    loaded = lewm.load(tmp_path / "model", device="cpu")
    assert type(loaded) is type(method)
    assert loaded.settings == method.settings
    assert loaded.facts == method.facts
    assert all(torch.equal(loaded.own_state()[key], tensor) for key, tensor in method.own_state().items())
    assert not loaded.training


# -- two processes -------------------------------------------------------------------------------------------------


def one_step(name: str, processes: Processes) -> dict[str, torch.Tensor]:
    """Loss and summed gradients of this process's part of a fixed batch."""
    method = build(name).train()
    share_batchnorm(method, processes)
    part = processes.part_of(BATCH)
    losses = loss_of(method, fake_batch(method.inputs).map(lambda tensor: tensor[part]), processes)
    (losses.total / processes.count).backward()
    processes.sum_gradients(method.parameters())
    gradients = {key: p.grad for key, p in method.named_parameters() if p.grad is not None}
    return {"total": processes.mean(losses.total.detach()), **gradients}


def worker(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    torch.save({name: one_step(name, Processes(rank, count)) for name in METHODS}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def of_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two processes found, by method."""
    folder = tmp_path_factory.mktemp("two")
    mp.spawn(worker, (2, str(folder)), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@every_method
def test_two_processes_have_the_loss_and_gradient_of_one(name: str, of_two: list[dict[str, Any]]):
    alone = one_step(name, Processes())
    for found in of_two:
        assert found[name].keys() == alone.keys()
        for key, expected in alone.items():
            scale = max(1.0, expected.abs().max().item())
            torch.testing.assert_close(found[name][key] / scale, expected / scale, atol=1e-5, rtol=1e-5, msg=key)
