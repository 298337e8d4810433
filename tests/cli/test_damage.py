"""Files with bytes that changed, that end too soon or are something else: they are read, or one sentence is said."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lewm import checkpoint
from lewm.config import Config

Lewm = Callable[..., Any]
TIMES = 40  # that each file is damaged
# Each kind of file, and the commands that read it.
READERS = {
    "dataset": [
        "info {dataset}",
        "data show {dataset} --out {out}.gif",
        "data check {dataset} --contact-sheet {out}.png",
        "data convert {dataset} {out} --to folder",
        "train debug --data {dataset} --device cpu --out {out}_run --train.steps 3 --loader.cache disk",
    ],
    "results": [
        "compare {results} {others}",
        "export {model} {out} --evaluations {results}",
        "eval {model} --device cpu --out {results}",
    ],
    "pairs": ["eval {model} --device cpu --eval.episodes 1 --eval.budget 10 --manifest {pairs} --out {out}.json"],
    "description": ["info {toy}", "export {model} {toy}"],
    "metrics": ["train debug --data {data} --device cpu --out {run}"],
}


def damaged(content: bytes, rng: random.Random) -> bytes:
    """A byte or three that changed, mostly near the beginning; or a file cut short; or something else."""
    kind = rng.random()
    if kind < 0.7:
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 3))):
            changed[rng.randrange(min(len(changed), rng.choice((400, 4000, len(changed)))))] ^= rng.randrange(1, 256)
        return bytes(changed)
    return content[: rng.randrange(len(content))] if kind < 0.9 else rng.randbytes(rng.randrange(200))


@pytest.fixture
def places(lewm: Lewm, debug_config: Config, debug_run: Path, tmp_path: Path) -> dict[str, Path]:
    """Whole files of every kind."""
    assert debug_config.data is not None
    model = Path(shutil.copytree(checkpoint.resolve(debug_run), tmp_path / "model"))
    run = Path(shutil.copytree(debug_run, tmp_path / "run"))
    dataset = Path(shutil.copy(debug_config.data, tmp_path / "dataset.h5"))
    pairs, results, others, toy = (tmp_path / name for name in ("pairs.json", "results.json", "others.json", "toy"))
    manifest = {
        "environment": "lewm/TwoRoom-v0",
        "goal_offset": 25,
        "pairs": [{"start": [60, 60], "goal": [60, 120]}] * 2,
    }
    pairs.write_text(json.dumps(manifest))
    for seed, path in enumerate((results, others)):
        lewm("eval", model, "--device", "cpu", "--seed", seed, "--out", path)
    lewm("export", model, toy)
    return {
        **{"model": model, "run": run, "data": debug_config.data, "toy": toy, "others": others},
        **{"dataset": dataset, "results": results, "pairs": pairs},
        **{"description": toy / "config.json", "metrics": run / "metrics.jsonl"},
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name == "dataset" else []) for name in READERS]
)
def test_damage_is_one_sentence_or_harmless(lewm: Lewm, places: dict[str, Path], tmp_path: Path, name: str):
    rng, whole, refused = random.Random(name), places[name].read_bytes(), 0
    for number in range(TIMES):
        places[name].write_bytes(damaged(whole, rng))
        for position, command in enumerate(READERS[name]):
            out = tmp_path / f"out {number} {position}"
            answer = lewm(*(part.format(**places, out=out) for part in command.split()))
            assert "Traceback" not in answer.err
            assert answer.status == 0 or answer.err.startswith("Error: "), (command, answer)
            refused += answer.status
        places[name].write_bytes(whole)
    assert refused > 0 or name == "metrics", "a line that is none ends the record"


@pytest.mark.parametrize("signature", [b"SNOD", b"TREE", b"HEAP"])
def test_a_dataset_whose_order_is_damaged_is_named(
    lewm: Lewm, places: dict[str, Path], tmp_path: Path, signature: bytes
):
    """HDF5 marks what its files are made of, and has an error of another kind for each mark that is missing."""
    places["dataset"].write_bytes(places["dataset"].read_bytes().replace(signature, b"XXXX"))
    for position, command in enumerate(READERS["dataset"]):
        answer = lewm(*(part.format(**places, out=tmp_path / f"out {position}") for part in command.split()))
        answer.assert_refused("dataset.h5", "damaged")
