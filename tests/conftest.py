"""What the tests share: the smallest dataset and the smallest trained model, made once per process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# Cube's arm controller solves small systems with OpenBLAS, which rounds differently from CPU to CPU, and contacts
# magnify that. Its kernels for AVX-512 give the frozen pairs. It chooses when NumPy is imported.
CPU = Path("/proc/cpuinfo")
HAS_AVX512 = CPU.is_file() and {f"avx512{part}" for part in ("f", "bw", "cd", "dq", "vl")} <= {*CPU.read_text().split()}
if HAS_AVX512:
    os.environ["OPENBLAS_CORETYPE"] = "SkylakeX"

import pytest
import torch

from lewm.config import Config
from lewm.data.collect import collect
from lewm.files import json_digest
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.train.loop import train

# The tensors are small and the tests run in parallel processes: more threads would only get in each other's way.
torch.set_num_threads(1)
# A shell that starts the tests in the background has them ignore Ctrl-C, and every process that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what is marked ``cuda`` where there is no such device."""
    for marker in item.iter_markers("cuda"):
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
        (generation,) = marker.args or (None,)
        if generation not in (None, torch.cuda.get_device_capability()[0]):
            pytest.skip(f"needs a CUDA device of generation {generation}")


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What lewm remembers between commands is not the user's."""
    os.environ["LEWM_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def frozen_arithmetic(env_name: str) -> None:
    """For tests that simulate frozen episodes anew: Cube's need the arithmetic that gives them."""
    if env_name == "cube" and not HAS_AVX512:
        pytest.skip("Cube's frozen pairs come from OpenBLAS's kernels for AVX-512, which this CPU cannot run")


@pytest.fixture(scope="session")
def debug_config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """The "debug" preset on the CPU, with its dataset collected."""
    config = preset("debug")
    path = tmp_path_factory.mktemp("data") / "tworoom.h5"
    collect(config.env, path, config.collect, config.seed)
    return replace(config, data=path, device="cpu")


@pytest.fixture(scope="session")
def debug_run(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished training run of ``debug_config``; not to be changed."""
    out = tmp_path_factory.mktemp("runs") / "debug"
    # After a few steps embeddings hardly vary: measured statistics would magnify their rounding to full size.
    train(replace(debug_config, out=out, train=replace(debug_config.train, calibration_batches=0)))
    return out


@pytest.fixture
def debug_model(debug_run: Path) -> LeWM:
    """A model trained for a few steps, in evaluation mode on the CPU."""
    return LeWM.from_pretrained(debug_run, device="cpu")


@pytest.fixture
def run_interpreted() -> Callable[..., None]:
    """Runs a test file as a script, in whose process Triton interprets kernels instead of compiling them.

    The choice is made when kernels are imported, for the whole process; so it takes a process of its own.
    """
    pytest.importorskip("triton")

    def run(file: str, *arguments: str) -> None:
        command, environment = [sys.executable, file, *arguments], os.environ | {"TRITON_INTERPRET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    return run


@pytest.fixture
def results(tmp_path: Path) -> Callable[..., Path]:
    """Writes what a comparison reads of an evaluation's results: NAME.json, with an outcome for each made-up pair."""

    def write(
        name: str,
        outcomes: list[tuple[bool, bool | None]],
        environment: str = "lewm/TwoRoom-v0",
        method: str = "lewm",
        budget: int = 50,
        places: dict[int, tuple[tuple[float, ...], tuple[float, ...]]] | None = None,
        moved: float = 0.0,
        manifest: str | None = None,
        recorded: bool = True,
        costs: list[float] | None = None,
        plans: int = 8,
        seconds: float = 0.5,
        flops: float | None = 1e12,
        device: str = "cpu",
    ) -> Path:
        episodes = []
        for index, (success, strict) in enumerate(outcomes):
            start, goal = (places or {}).get(index, ((50.0, 50.0 + index), (60.0 + moved, 50.0)))
            of_random = {"random_policy_success": index == 0, "random_policy_strict_success": strict and False}
            done = {"recorded_success": True, "recorded_strict_success": None if strict is None else True}
            mine = {"success": success, "strict_success": strict, "plan_costs": (costs or [2.0]) if plans else []}
            pair = {"index": index, "start": start, "goal": goal}
            episodes.append(pair | mine | of_random | (done if recorded else {}))
        document = {
            "question": json_digest([name, outcomes]),
            "command": f"lewm eval {name}",
            "device": device,
            "environment": environment,
            "rates": {},
            "times": {"plans": plans, "seconds_per_plan_p50": seconds},
            "flops_per_plan": flops if plans else None,
            "episodes": episodes,
            "config": {
                "method": {"name": method},
                "plan": {"solver": "cem", "schedule": "whole"},
                "eval": {"budget": budget, "manifest": manifest},
            },
        }
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document, indent=2))
        return path

    return write
