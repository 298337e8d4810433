"""Several processes are one run: one loss and gradient, one stop, one checkpoint; and a lost process comes back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from lewm import checkpoint
from lewm.config import CollectConfig, Config
from lewm.errors import ConfigError, TrainingError
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.train import distributed
from lewm.train.distributed import Processes, join_processes, share_batchnorm
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.step import PlainStep
from lewm.types import ALONE, ActionStats, Batch, DataFacts, Losses, Peers

BATCH = 8


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def without_dropout(config: Config) -> Config:
    """Dropout is drawn per process; without it, dividing a batch changes nothing but rounding."""
    return replace(config, method=replace(config.method, predictor=replace(config.method.predictor, dropout=0.0)))


class Isolated(LeWM):
    """Each process computes its statistics over its own part of a batch."""

    def losses(self, batch: Batch, draws: dict[str, torch.Tensor], peers: Peers) -> Losses:  # noqa: ARG002
        return super().losses(batch, draws, ALONE)


def one_step(processes: Processes, naive: bool, kind: str = "vit") -> dict[str, torch.Tensor]:
    """Losses, gradients and BatchNorm statistics after one step on this process's part of a fixed batch."""
    config = without_dropout(preset("debug"))
    settings = replace(config.method, encoder=replace(config.method.encoder, kind=kind))
    torch.manual_seed(0)
    model = (Isolated if naive else LeWM)(settings, DataFacts(ActionStats((0.0, 0.0), (1.0, 1.0))))
    # As after some training: gates are open, and frames do not look alike, which would amplify rounding.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    pixels = torch.randint(0, 256, (BATCH, 4, 28, 28, 3), dtype=torch.uint8)
    batch = Batch(torch.randn(BATCH, 4, 5, 2), pixels)
    part = processes.part_of(BATCH)
    if not naive:
        share_batchnorm(model, processes)
    training = replace(config.train, clip_norm=1e9)
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "clip": ""}], lr=0.0)
    step = PlainStep(model, optimizer, training, processes)
    losses = step(batch.map(lambda tensor: tensor[part]), model.draws(0, 0, model.device)).losses
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    buffers = {name: b for name, b in model.named_buffers() if "running" in name}
    return {"loss": processes.mean(losses.total), "sigreg": losses.terms["sigreg"], **gradients, **buffers}


def step_on_images(processes: Processes, shared: bool) -> dict[str, torch.Tensor]:
    """Outputs, gradients and statistics of BatchNorms between convolutions, on this process's part of some images."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(), nn.Conv2d(5, 4, 3, stride=2), nn.BatchNorm2d(4)
    )
    images = 2 * torch.randn(BATCH, 3, 12, 10) + torch.arange(BATCH).view(-1, 1, 1, 1)  # not alike in each part
    part = processes.part_of(BATCH)
    weights = torch.randn(BATCH, 4, 4, 3)[part]
    if shared:
        share_batchnorm(network, processes)
    mine = images[part].clone().requires_grad_()
    outputs = network(mine)
    ((outputs.square() * weights).mean() / processes.count).backward()
    processes.sum_gradients(network.parameters())
    evaluated = network.eval()(images[:2])
    whole = {"outputs": outputs, "images' gradient": mine.grad}
    gradients = {name: parameter.grad for name, parameter in network.named_parameters()}
    found = {name: processes.concatenate(tensor.detach()) for name, tensor in whole.items()}
    return found | gradients | dict(network.named_buffers()) | {"evaluated": evaluated.detach()}


def worker(rank: int, count: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=count)
    processes = Processes(rank, count)
    found: dict[Any, Any] = {naive: one_step(processes, naive) for naive in (False, True)}
    found["images"] = {shared: step_on_images(processes, shared) for shared in (False, True)}
    if count == 2:
        found["resnet18"] = one_step(processes, naive=False, kind="resnet18")
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("count", [2, 4])
def test_processes_have_the_loss_and_gradient_of_one(count: int, tmp_path: Path) -> None:
    alone = one_step(Processes(), naive=False)
    mp.spawn(worker, (count, str(tmp_path)), nprocs=count)
    for rank in range(count):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found[False].keys() == alone.keys()
        for name, expected in alone.items():
            torch.testing.assert_close(found[False][name], expected, rtol=1e-5, atol=1e-5, msg=name)
        # Each process with statistics of its own, as is usual, is another method.
        naive_error = max((found[True][name] - expected).abs().max() for name, expected in alone.items())
        assert naive_error > 1e-2
        assert abs(found[True]["sigreg"] - alone["sigreg"]) > 1e-2
        check_images(found["images"])
        if count == 2:
            check_resnet(found["resnet18"])


def check_images(found: dict[bool, dict[str, torch.Tensor]]) -> None:
    """BatchNorms that are shared do what one does with all images; others do not."""
    alone = step_on_images(Processes(), shared=False)
    assert {name for name in alone if "running" in name} == {
        f"{i}.running_{m}" for i in (1, 4) for m in ("mean", "var")
    }
    for name, expected in alone.items():
        torch.testing.assert_close(found[True][name], expected, rtol=1e-4, atol=1e-5, msg=name)
    for name in ("outputs", "images' gradient", "1.running_mean", "0.weight", "evaluated"):
        assert (found[False][name] - alone[name]).norm() > 1e-2 * alone[name].norm(), name


def check_resnet(found: dict[str, torch.Tensor]) -> None:
    """Twenty BatchNorms behind one another, as one process has them."""
    alone = one_step(Processes(), naive=False, kind="resnet18")
    assert found.keys() == alone.keys()
    assert sum(name.startswith("encoder.") and name.endswith("running_var") for name in alone) == 20
    for name, expected in alone.items():
        assert (found[name] - expected).norm() <= 1e-3 * expected.norm() + 1e-6, name


def test_a_batch_is_divided_into_equal_parts() -> None:
    parts = [Processes(rank, 4).part_of(8) for rank in range(4)]
    assert [i for part in parts for i in range(8)[part]] == list(range(8))
    with pytest.raises(ConfigError, match=r"train\.batch_size \(10\) must be a multiple of the 4 processes.*Use 8"):
        Processes(1, 4).part_of(10)


@pytest.mark.parametrize(
    ("device", "gpus", "error", "message"),
    [
        ("cuda", 1, TrainingError, "2 processes on this machine, which has 1 GPUs.*--nproc-per-node 1"),
        ("cuda:0", 2, ConfigError, "use --device cuda, not cuda:0"),
        ("mps", 0, ConfigError, "not on mps"),
    ],
)
def test_devices_that_processes_cannot_share(
    device: str, gpus: int, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(distributed, "resolve_device", torch.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(error, match=message), join_processes(device):
        pass
    monkeypatch.setenv("LOCAL_RANK", "1")  # the first process of the machine has said why
    with pytest.raises(SystemExit), join_processes(device):
        pass


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not"),
        ({"RANK": "0"}, "RANK is set and WORLD_SIZE is not"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, r"RANK must be less than WORLD_SIZE \(2\), got 2"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK must be less than WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK must be less than WORLD_SIZE"),
        ({"RANK": "first", "WORLD_SIZE": "2"}, "RANK must be a number from 0 up, got 'first'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK must be a number from 0 up, got '-1'"),
        ({"RANK": "0", "WORLD_SIZE": ""}, "WORLD_SIZE must be a number from 0 up, got ''"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "could not find one another"),
    ],
)
def test_half_a_launch_trains_nothing(
    debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], message: str
) -> None:
    """Neither alone nor mute, nor waiting for processes that nobody has started."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(TrainingError, match=message):
        train(replace(debug_config, out=tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []


# -- whole runs under torchrun ----------------------------------------------------------------------------------------


def options(config: Config, run: Path, steps: int, **changes: Any) -> list[str]:
    settings = {"steps": steps, "batch-size": 8, "checkpoint-every": 10, "log-every": 1}
    settings |= changes
    values = [f"--train.{name}={value}" for name, value in settings.items()]
    common = ["--method.predictor.dropout=0", "--device=cpu", f"--data={config.data}", f"--out={run}"]
    return ["train", "debug", *values, *common]


def torchrun(count: int, *arguments: str, restarts: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={count}"]
    command += [
        f"--max-restarts={restarts}",
        "--master-addr=127.0.0.1",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(row["step"] >= step for row in read_metrics(run / "metrics.jsonl")):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, f"step {step} was not reached"
        time.sleep(0.01)


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Process ids of the trainers that torchrun has started."""
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def assert_same_training(one: Path, other: Path) -> None:
    """The same loss at every step, up to rounding.

    Weights are no measure: some have no gradient but rounding, out of which AdamW makes whole steps.
    """
    curves = [[row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] for run in (one, other)]
    assert curves[0] == pytest.approx(curves[1], rel=1e-3)


@pytest.fixture(scope="module")
def alone(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps by one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    settings = replace(debug_config.train, steps=60, batch_size=8, checkpoint_every=10)
    train(replace(without_dropout(debug_config), out=out, train=replace(settings, log_every=1)))
    return out


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the processes through /proc")
def test_a_lost_process_comes_back_and_the_run_ends_as_one_process_would(
    debug_config: Config, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    process = torchrun(2, "-m", "lewm", *options(debug_config, run, 60), restarts=1)
    wait_for_step(process, run, 15)
    os.kill(workers_of(process)[-1], signal.SIGKILL)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, (out, err)
    assert re.search(r"Continuing .* at step [1-6]0\.", out)
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row] == list(range(1, 61))
    assert_same_training(run, alone)


@pytest.mark.slow
def test_a_signal_stops_all_at_one_step_and_fewer_processes_continue(
    debug_config: Config, alone: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    # Much validation between the steps, or all are done before the signal comes on a busy machine.
    slowly = {"val-every": 1, "val-batches": 50}
    process = torchrun(4, "-m", "lewm", *options(debug_config, run, 60, **slowly))
    wait_for_step(process, run, 5)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    stopped = re.search(r"(\d+) steps; checkpoint", out)
    assert stopped, (out, err)
    steps = int(stopped[1])
    assert 5 <= steps < 60
    newest = checkpoint.latest(run / "checkpoints")
    assert newest is not None
    assert newest.name == f"step_{steps:07d}"
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == steps
    assert "Lost contact" not in err
    continued = torchrun(2, "-m", "lewm", *options(debug_config, run, 60))
    out, err = continued.communicate(timeout=120)
    assert continued.returncode == 0, (out, err)
    assert f"at step {steps}." in out
    assert_same_training(run, alone)


@pytest.mark.slow
def test_mistakes_are_explained_once_and_nothing_hangs(debug_config: Config, tmp_path: Path) -> None:
    """A batch that cannot be divided; too little data; processes that were given different things."""
    run = tmp_path / "run"
    script = tmp_path / "differ.py"
    script.write_text(
        textwrap.dedent("""
        import os, sys
        from lewm import cli
        what, *arguments = sys.argv[1:]
        if os.environ["RANK"] == "1":
            arguments.append({"settings": "--seed=1", "pace": "--train.log-every=2"}.get(what, f"--data={what}"))
        sys.exit(cli.run(arguments))
        """)
    )
    other_data = tmp_path / "other.h5"
    from lewm.data.collect import collect

    collect(debug_config.env, other_data, CollectConfig(9, 28, workers=1), seed=5)
    plain, differ = ("-m", "lewm"), str(script)
    cases = [
        ((*plain, *options(debug_config, run, 5, **{"batch-size": 9})), "must be a multiple of the 2 processes"),
        ((*plain, *options(debug_config, run, 5, **{"batch-size": 5000})), "fewer than one batch of 5000"),
        ((differ, "settings", *options(debug_config, run, 5)), "do not have the same settings: seed (0 / 1)"),
        ((differ, "pace", *options(debug_config, run, 5)), "same settings: train.log_every (1 / 2)"),
        ((differ, str(other_data), *options(debug_config, run, 5)), "do not have the same dataset: digest ("),
        ((differ, "nowhere.h5", *options(debug_config, run, 5)), "Process 1: "),
    ]
    started = [(torchrun(2, *arguments), message) for arguments, message in cases]
    for process, message in started:
        out, err = process.communicate(timeout=200)
        assert process.returncode == 1, (out, err)
        text = " ".join(err.split())
        assert text.count(message) == 1, (message, err)
        assert "lewm/" not in err  # the only traceback is torchrun's own
    assert not run.exists()
