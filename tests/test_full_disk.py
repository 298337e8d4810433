"""A disk that is full, or a place that cannot be written: one sentence, nothing lost, and the same command then works.

A process that may only write small files fails as on a full disk, wherever a file grows beyond that.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import resource
import shutil
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from lewm import checkpoint, cli
from lewm.config import Config

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    ["torch", "lewm.cli.eval", "lewm.evaluate.runner", "lewm.train.loop", "sklearn.manifold", __name__]
)
# What each verb writes; {data} and {model} are what it reads.
COMMANDS = {
    "collect": "collect tworoom --episodes 6 --resolution 28 --workers 1 --out OUT/new.h5",
    # Its measurements outgrow the disk before its first checkpoint does.
    "train": "train debug --data {data} --device cpu --out OUT/run --train.log-every 1 --train.checkpoint-every 8",
    "eval": "eval {model} --device cpu --out OUT/results.json",
    "eval, films": "eval {model} --device cpu --out OUT/results.json --videos 1",
    "export": "export {model} OUT/toy",
    "show, GIF": "data show {data} --out OUT/film.gif",
    "show, MP4": "data show {data} --out OUT/film.mp4",
    "convert, HDF5": "data convert {data} OUT/copy.h5",
    "convert, folder": "data convert {data} OUT/copy --to folder",
    "convert, LeRobot": "data convert {data} OUT/copy --to lerobot",
    "probe": "understand probe {model} --data {data} --device cpu --out OUT --probe.splits 1 --probe.epochs 1",
    "decode": "understand decode {model} --data {data} --device cpu --out OUT --train --steps 1 --batch 4 --blocks 1",
    "map": "understand map {model} --device cpu --out OUT --grid 4",
    "landscape": "understand landscape {model} --data {data} --device cpu --out OUT",
    "surprise": "understand surprise {model} --data {data} --device cpu --out OUT --trajectories 2 --after 0",
}
LIMITS = (0, 100, 1000, 2500, 20_000)  # bytes of a file


def work(arguments: list[str], limit: int | None, answer: Connection) -> None:
    torch.set_num_threads(1)
    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(arguments)
    answer.send((status, err.getvalue()))


def lewm(arguments: list[str], limit: int | None = None) -> tuple[int, str]:
    """Runs `lewm ARGUMENTS`, with files of at most ``limit`` bytes: the status, and what was complained of."""
    here, there = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(arguments, limit, there))
    process.start()
    there.close()
    with contextlib.closing(here):
        try:
            answer: tuple[int, str] = here.recv()
        except EOFError:
            pytest.fail(f"lewm {' '.join(arguments)} ended with a traceback, with files of at most {limit} bytes")
    process.join()
    return answer


@pytest.fixture
def inputs(debug_config: Config, debug_run: Path, tmp_path: Path) -> dict[str, Path]:
    assert debug_config.data is not None
    data = Path(shutil.copy(debug_config.data, tmp_path / "in.h5"))
    return {"data": data, "model": shutil.copytree(checkpoint.resolve(debug_run), tmp_path / "model")}


def contents(inputs: dict[str, Path]) -> list[bytes]:
    files = [file for path in inputs.values() for file in ([path] if path.is_file() else sorted(path.iterdir()))]
    return [file.read_bytes() for file in files]


SLOW = {"train", "convert, folder", "probe", "decode", "map", "landscape", "surprise"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name in COMMANDS]
)
def test_a_full_disk_is_one_sentence_and_the_command_works_later(name: str, inputs: dict[str, Path], tmp_path: Path):
    before, refused = contents(inputs), 0
    for limit in LIMITS:
        out = tmp_path / f"out {limit}"
        arguments = [part.format(**inputs).replace("OUT", str(out)) for part in COMMANDS[name].split()]
        status, complaint = lewm(arguments, limit)
        if status != 0:
            refused += 1
            assert complaint.startswith("Error: ")
            assert len(complaint.splitlines()) == 1
            assert "cannot be written" in complaint or "could not be written" in complaint
            status, complaint = lewm(arguments)
        assert (status, complaint) == (0, "")
        assert not list(out.rglob("*.tmp"))
        assert contents(inputs) == before
    assert refused > 1


@pytest.mark.parametrize("name", COMMANDS)
def test_a_place_that_cannot_be_written_is_named(name: str, inputs: dict[str, Path]):
    before = contents(inputs)
    arguments = [part.format(**inputs).replace("OUT", "/proc/nowhere") for part in COMMANDS[name].split()]
    status, complaint = lewm(arguments)
    assert status == 1
    assert complaint.startswith("Error: /proc/nowhere")
    assert len(complaint.splitlines()) == 1
    assert "cannot be written" in complaint
    assert contents(inputs) == before
