"""Findings count while all that was written is as it was: nothing damaged, mixed or somebody else's is shown."""

from __future__ import annotations

import contextlib
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from lewm.errors import FileError
from lewm.evaluate.comparison_tables import Table
from lewm.understand.findings import Findings, check_outputs, read_findings, write_findings

matplotlib.use("agg")
VERB = "probe"


def findings(asked: int) -> Findings:
    table, question = Table("What", ("a", "b"), (("1", "2"),)), {"verb": VERB, "seed": asked}
    return Findings(VERB, "Title", question, (table,), (f"Seed {asked}.",), {"r": [0.1 * asked, None]}, {"x.csv": "X"})


def draw(_: Findings) -> Figure:
    figure = Figure((1, 1))
    figure.add_subplot()
    return figure


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "x.csv").write_text("1,2\n")
    write_findings(tmp_path, findings(1), draw)
    return tmp_path


def test_what_was_written_is_read(out: Path) -> None:
    assert read_findings(out, VERB) == findings(1)
    assert read_findings(out, VERB, findings(1).question) == findings(1)
    assert read_findings(out, VERB, findings(2).question) is None
    assert sorted(path.name for path in out.iterdir()) == ["probe.json", "probe.md", "probe.png", "x.csv"]


def test_no_flipped_byte_gives_other_findings(out: Path) -> None:
    path, rng = out / "probe.json", np.random.default_rng(0)
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(FileError):
            assert read_findings(out, VERB) in (None, findings(1)), "white space may differ"
    path.write_bytes(content.replace(b"0.1", b"0.2"))
    with pytest.raises(FileError, match="Remove it and ask again"):
        read_findings(out, VERB)


@pytest.mark.parametrize("name", ["probe.md", "probe.png", "x.csv"])
def test_files_beside_it_that_are_gone_or_changed_are_made_again(out: Path, name: str) -> None:
    content = (out / name).read_bytes()
    (out / name).write_bytes(content[:-1])
    assert read_findings(out, VERB) is None
    (out / name).unlink()
    assert read_findings(out, VERB, findings(1).question) is None
    write_findings(out, findings(1), draw) if name != "x.csv" else (out / name).write_bytes(content)
    assert read_findings(out, VERB) == findings(1)


def test_a_kill_between_figure_and_json_leaves_no_figure_of_another_question(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("lewm.understand.findings.write_json", killed)
    with pytest.raises(KeyboardInterrupt):
        write_findings(out, findings(2), draw)
    assert read_findings(out, VERB, findings(1).question) is None, "its page is the second question's"


def test_nobody_elses_picture_or_notes_are_overwritten(tmp_path: Path) -> None:
    for name in ("probe.md", "probe.json", "probe.png"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(FileError, match="stays as it is"):
            check_outputs(tmp_path, VERB, [])
        (tmp_path / name).unlink()
    check_outputs(tmp_path, VERB, [])
