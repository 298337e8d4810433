"""Verbs that are killed or interrupted anywhere: the same command then finds the same, and leaves nothing else."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lewm import cli
from lewm.config import CollectConfig
from lewm.data.collect import collect

CONTEXT = multiprocessing.get_context("forkserver")  # processes that begin with everything imported
PARTS = ("decode", "imagine", "landscape", "latent_map", "notice", "probe", "report", "straightness", "surprise")
IMPORTED = [f"lewm.understand.{name}" for name in PARTS]
CONTEXT.set_forkserver_preload(["torch", "sklearn.manifold", *IMPORTED, __name__])
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
MOMENTS = 6  # at which each command is ended
VERBS = {
    "probe": ["--probe.splits=2", "--probe.epochs=2"],
    "decode": ["--train", "--steps=3", "--batch=4", "--windows=4", "--blocks=2", "--shown=1", "--width=8"],
    "map": ["--grid=5"],
    "imagine": ["--windows=4", "--searches=1", "--blocks=2"],
    "notice": ["--quick"],
    "landscape": [],
    "surprise": ["--trajectories=3", "--before=1", "--after=1"],
    "report": ["--quick", "--skip=probe", "--skip=map", "--skip=imagine", "--skip=notice"],
}


def ask(verb: str, model: Path, folder: Path) -> list[str]:
    options = ["--data", str(folder / "data.h5"), "--out", str(folder / "out"), "--device=cpu", *VERBS[verb]]
    return ["understand", verb, str(model), *options]


def work(arguments: list[str], folder: Path, number: int | None, how: int) -> None:
    """Run a command, and get a signal before the change with this number in what is in a folder; else count them."""
    changes = itertools.count()

    def count(event: str, given: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = given
            is_change = str(path).startswith(str(folder)) and flags & WRITING
        else:
            is_change = event in CHANGES
        if is_change and next(changes) == number:
            os.kill(os.getpid(), how)

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout = sys.stderr = (folder / "said.txt").open("a")
    sys.addaudithook(count)
    status = cli.run(arguments)
    if number is None:
        (folder / "changes.txt").write_text(str(next(changes)))
    sys.exit(status)


def run(arguments: list[str], folder: Path, number: int | None = None, how: int = signal.SIGKILL) -> int | None:
    process = CONTEXT.Process(target=work, args=(arguments, folder, number, how))
    process.start()
    process.join()
    return process.exitcode


def found(folder: Path) -> dict[str, bytes]:
    """All that is in a folder, but for what says where it lies, and what was printed."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name: path.read_bytes() if path.suffix != ".html" else b""
        for name, path in files.items()
        if name not in ("said.txt", "changes.txt")
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "data.h5"
    collect("tworoom", path, CollectConfig(12, resolution=28, workers=1, frame_stride=5), 4)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_whoever_asks_again_finds_the_same(verb: str, debug_run: Path, data: Path, tmp_path: Path) -> None:
    def place(name: str) -> Path:
        (tmp_path / name).mkdir()
        shutil.copy(data, tmp_path / name / "data.h5")
        return tmp_path / name

    whole = place("whole")
    assert run(ask(verb, debug_run, whole), whole) == 0, (whole / "said.txt").read_text()
    wanted, last = found(whole), int((whole / "changes.txt").read_text())
    rng = random.Random(verb)
    for number, how in zip(sorted(rng.sample(range(last), MOMENTS)), itertools.cycle(SIGNALS), strict=False):
        folder = place(f"{number}")
        arguments = ask(verb, debug_run, folder)
        code = run(arguments, folder, number, how)
        said = (folder / "said.txt").read_text()
        assert code in (0, -signal.SIGKILL if how == signal.SIGKILL else 130), said
        assert "Traceback" not in said
        assert run(arguments, folder) == 0, (folder / "said.txt").read_text()
        again = found(folder)
        assert again.keys() == wanted.keys(), f"{how.name} at change {number}"
        assert [name for name in wanted if again[name] != wanted[name]] == [], f"{how.name} at change {number}"
        shutil.rmtree(folder)
