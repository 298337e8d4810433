"""Every benchmark runs, at toy size: what nobody runs rots when something that it uses moves."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lewm.config import Config, PlanConfig

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
QUICK = PlanConfig(horizon=2, samples=8, iterations=2, elites=2)

Benchmark = Callable[[str], ModuleType]
Run = Callable[..., str]

needs_public = pytest.mark.skipif(
    not importlib.util.find_spec("stable_worldmodel") or not importlib.util.find_spec("transformers"),
    reason="needs the public implementation",
)


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[Benchmark]:
    """A benchmark by its file's name; what it imports of its neighbours goes again after the test."""
    before, gradients, threads = set(sys.modules), torch.is_grad_enabled(), torch.get_num_threads()
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield importlib.import_module
    torch.set_grad_enabled(gradients)
    torch.set_num_threads(threads)
    for name in set(sys.modules) - before:
        path = getattr(sys.modules[name], "__file__", None)
        if path and Path(path).parent == BENCHMARKS:
            del sys.modules[name]


@pytest.fixture
def run(benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a benchmark's ``main`` with arguments of a command line; returns what it printed."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        benchmark(name).main()
        return capsys.readouterr().out

    return call


def test_each_has_a_test():
    """Whoever adds a benchmark adds a test below."""
    others = {"peer"}  # it only loads the public implementation
    names = {path.stem for path in BENCHMARKS.glob("*.py")} - others
    assert {name for name in names if f"test_{name}" not in globals()} == set()


# -- speed ---------------------------------------------------------------------------------------------------------


def test_monitor(debug_run: Path, benchmark: Benchmark, capsys: pytest.CaptureFixture[str]):
    benchmark("monitor").main((str(debug_run),), rounds=1, steps=3)
    assert "ms a step" in capsys.readouterr().out


def test_token_plans(run: Run, tmp_path: Path):
    small = ("--device", "cpu", "--tokens", 2, "--samples", 4, "--repeats", 1, "--json", tmp_path / "rows.json")
    plans = ("--preset", "debug", "--side", 28, "--cells", 1, "--iterations", 2)
    assert "difference" in run("token_plans", "--features", 6, "--context", 1, 3, *small, *plans)
    found = json.loads((tmp_path / "rows.json").read_text())
    rows = found["searches"]
    assert [plan["ratio"] > 0 for plan in found["plans"]] == [True, True]
    assert found["plans"][0]["ratio"] == 1
    assert [row["context"] for row in rows] == [1, 3]
    assert all(row["seconds"] > 0 and row["plain_seconds"] > 0 and row["difference"] < 1e-5 for row in rows)


@needs_public
def test_train(run: Run, tmp_path: Path):
    options = ("--size", "toy", "--device", "cpu", "--steps", 2, "--episodes", 4, "--workers", 0)
    answer = run("train", *options, "--kept-patches", 2, "--cache", "ram", "disk", "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert list(rows) == [
        *("ours, data included", "ours, frames: disk", "ours, 2 patches kept"),
        *("public, batch on the device", "public, HDF5 loader"),
    ]
    assert all(row["ms"] > 0 and row["tflops"] > 0 for row in rows.values())
    assert all(name in answer for name in rows)


@needs_public
def test_plan(run: Run, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(benchmark("plan"), "PAPER", QUICK)
    run("plan", "--device", "cpu", "--environments", 1, 2, "--json", tmp_path / "plan.json")
    found = json.loads((tmp_path / "plan.json").read_text())
    assert [row["environments"] for row in found["rows"]] == [1, 2]
    assert found["largest_difference_of_plans"] < 1e-3
    assert found["latency"]["p50_ms"] > 0
    assert len([name for name in found if name.startswith("search_only_")]) == 4


@needs_public
def test_data(run: Run, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, value in (("ROUNDS", 1), ("READ_SECONDS", 0.01), ("BATCH", 4)):
        monkeypatch.setattr(benchmark("data"), name, value)
    options = ("--envs", "tworoom", "--episodes", 2, "--workers", 1, "--threads", 1)
    run("data", *options, "--json", tmp_path / "data.json")
    found = json.loads((tmp_path / "data.json").read_text())
    assert [row["environment"] for row in found["collecting"]] == ["tworoom"]
    assert [row["reader"] for row in found["reading"]] == [
        *("lewm, 1 threads", "h5py slicing", "stable-worldmodel"),
        *("h5py slicing, 1 processes", "stable-worldmodel, 1 processes"),
    ]
    assert all(row["samples/s"] > 0 for row in found["reading"])


def test_render(run: Run, tmp_path: Path):
    frames = tmp_path / "frames.npz"
    run("render", "--env", "tworoom", "--frames", 4, "--resolution", 28, "--out", frames)
    answer = run("render", "--env", "tworoom", "--compare", frames)
    assert "4 frames of 28 px" in answer
    assert "mean 0.0000, max 0" in answer


def test_solvers(debug_run: Path, benchmark: Benchmark, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    solvers = benchmark("solvers")
    for name, value in (("SAMPLED", ((8, 2),)), ("DESCENDED", ((2, 2),)), ("SCHEDULE_CEM", QUICK)):
        monkeypatch.setattr(solvers, name, value)
    solvers.main(debug_run, episodes=1, threads=1)
    answer = capsys.readouterr().out
    named = ("cem 8 x 2", "icem 8 x 2", "mppi 8 x 2", "sgd 2 x 2", "adam 2 x 2", "whole", "shrinking, warm start")
    assert all(name in answer for name in named)


def test_plan_settings(debug_run: Path, benchmark: Benchmark, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    manifest = tmp_path / "pairs.json"
    pairs = [{"start": [60, 60], "goal": [60, 120]}]
    manifest.write_text(json.dumps({"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": pairs}))
    quick = "samples=8,iterations=2,elites=2,horizon=2"
    smooth = f"solver=icem,icem.noise_exponent=2,{quick}"
    plan_settings = benchmark("plan_settings")
    plan_settings.main(debug_run, "tworoom", manifest, [quick, smooth], pairs=1)
    answer = capsys.readouterr().out
    assert quick in answer
    assert smooth in answer
    for wrong in ("sampels=8", "solver", "icem.noise=1"):
        with pytest.raises(SystemExit, match=r"sampels|solver|noise"):
            plan_settings.parse_setting(wrong)


@pytest.mark.slow
def test_speedrun(run: Run, debug_config: Config, tmp_path: Path):
    options = ("--preset", "debug", "--seeds", 0, "--steps", 4, "--checkpoints", 2, "--pairs", 2)
    schedules = ("--schedules", "whole", "--", "--device=cpu")
    answer = run("speedrun", "--data", debug_config.data, "--out", tmp_path / "speed", *options, *schedules)
    rows = json.loads((tmp_path / "speed" / "speedrun.json").read_text())
    assert [(row["step"], row["schedule"], row["episodes"]) for row in rows] == [(2, "whole", 2), (4, "whole", 2)]
    assert rows[0]["seconds"] < rows[1]["seconds"]
    assert "| 0 | 4 |" in answer


def test_speedrun_keeps_what_a_run_removes(benchmark: Benchmark, tmp_path: Path):
    checkpoints, kept = tmp_path / "checkpoints", tmp_path / "kept"
    with benchmark("speedrun").keeping(checkpoints, kept):
        (checkpoints / "step_0000002").mkdir(parents=True)
        (checkpoints / "step_0000002" / "optimizer.safetensors").write_bytes(b"numbers")
    (checkpoints / "step_0000002" / "optimizer.safetensors").unlink()
    assert (kept / "step_0000002" / "optimizer.safetensors").read_bytes() == b"numbers"


def test_background(debug_config: Config, benchmark: Benchmark, capsys: pytest.CaptureFixture[str]):
    benchmark("background").main(debug_config.data, frames=8)
    answer = capsys.readouterr().out
    assert "8 frames of 4 patches" in answer
    assert "not background" in answer
