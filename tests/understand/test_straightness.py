"""Straightness: 1 on a straight path, over training of several runs, and said to be missing where it is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lewm import checkpoint
from lewm.config import Config
from lewm.errors import ConfigError
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.run import Run
from lewm.understand import straightness as verb
from lewm.understand.findings import write_findings
from lewm.understand.straightness import compare_straightness, geometry, investigate, recorded_curves, run_of
from lewm.understand.subject import open_episodes, open_subject


def path(*points: tuple[float, float]) -> torch.Tensor:
    return torch.tensor(points)


def test_known_paths() -> None:
    line = path((0, 0), (1, 2), (2, 4), (5, 10))
    corner = path((0, 0), (1, 0), (1, 1))
    assert geometry([line]).straightness == pytest.approx(1)
    assert geometry([corner]).straightness == pytest.approx(0, abs=1e-6)
    both = geometry([line, corner])
    assert both.straightness == pytest.approx(2 / 3), "every turn counts alike"
    assert (both.turns, both.episodes, both.dimensions) == (3, 2, 2)
    short = geometry([path((0, 0), (1, 1))])
    assert (short.straightness, short.spread, short.turns) == (None, None, 0)


@pytest.fixture(scope="module")
def kept(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a series."""
    out = tmp_path_factory.mktemp("kept") / "kept"
    train(replace(debug_config, out=out, train=replace(debug_config.train, keep_every=4)))
    return out


def test_a_run_and_its_checkpoints_know_what_was_recorded(kept: Path) -> None:
    newest = checkpoint.latest(kept / "checkpoints")
    assert newest is not None
    assert run_of(kept) == run_of(newest) == run_of(checkpoint.of_run(Run(kept).series)[0]) == kept
    assert run_of("pusht") is None
    best, other = recorded_curves(kept)
    assert (best.of, other.of) == ("held-out windows", "training batches")
    rows = [row for row in read_metrics(kept / "metrics.jsonl") if "val/straightness" in row]
    assert best.values == tuple(row["val/straightness"] for row in rows)
    assert best.steps == (4, 8)


def test_several_runs_on_one_page(kept: Path, debug_run: Path, tmp_path: Path) -> None:
    found = compare_straightness([("one", str(kept)), ("two", str(debug_run))])
    (table,) = found.tables
    assert [row[:3] for row in table.rows] == [(name, "lewm", "held-out windows") for name in ("one", "two")]
    write_findings(tmp_path, found, verb.draw)
    assert (tmp_path / "straightness.png").stat().st_size > 5000
    json.loads((tmp_path / "straightness.json").read_text(), parse_constant=pytest.fail)


def test_measurements_alone_are_enough(kept: Path, tmp_path: Path) -> None:
    """As they come from another machine, without models."""
    for name, files in (("bare", ["metrics.jsonl"]), ("settings", ["metrics.jsonl", "config.json"])):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_bytes((kept / file).read_bytes())
    found = compare_straightness([(name, str(tmp_path / name)) for name in ("bare", "settings")])
    assert [row[1] for row in found.tables[0].rows] == ["–", "lewm"]


def test_a_series_is_measured_on_given_episodes(kept: Path, debug_config: Config) -> None:
    assert debug_config.data is not None
    subject = open_subject(kept, "cpu")
    with open_episodes(debug_config.data, subject) as store:
        found = compare_straightness([("run", str(kept))], store, series=True, device="cpu")
        last = verb.measure(open_subject(checkpoint.of_run(Run(kept).series)[-1], "cpu"), store)
    entry = found.numbers["entries"][0]
    assert entry["curves"][0]["of"] == "given episodes"
    assert entry["curves"][0]["steps"] == [4, 8]
    assert entry["curves"][0]["values"][-1] == pytest.approx(last.straightness)
    assert entry["now"]["episodes"] == 8
    assert len(found.tables) == 2


def test_runs_without_the_metric_say_so(kept: Path, debug_run: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    checkpoints = Run(debug_run).checkpoints
    silent.mkdir()
    (silent / "checkpoints").symlink_to(checkpoints)
    (silent / "metrics.jsonl").write_text('{"step": 2, "loss": 1.0, "straightness": NaN}\n')
    found = compare_straightness([("kept", str(kept)), ("silent", str(silent))])
    assert any(sentence.startswith("silent: nothing over training") for sentence in found.sentences)
    with pytest.raises(ConfigError, match="--data"):
        compare_straightness([("silent", str(silent))])


def test_a_part_of_the_report_is_read_again(kept: Path, debug_config: Config, tmp_path: Path) -> None:
    assert debug_config.data is not None
    subject = open_subject(kept, "cpu")
    with open_episodes(debug_config.data, subject) as store:
        found = investigate(subject, store, tmp_path, 0, False, None)
        written = (tmp_path / "straightness.json").stat().st_mtime_ns
        assert investigate(subject, store, tmp_path, 0, False, None) == found
    assert (tmp_path / "straightness.json").stat().st_mtime_ns == written
