"""`lewm demo` on the smallest settings: everything appears, is reused, and can be made again."""

from __future__ import annotations

import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lewm.cli.demo import run_demo
from lewm.config import Config
from lewm.errors import LewmError
from lewm.evaluate.results import LABELS
from lewm.evaluate.stats import Rate
from lewm.files import file_digest, json_digest, only_writer
from lewm.presets import preset
from lewm.train.loop import train

CONFIG = replace(preset("debug"), device="cpu")
REUSED = ("dataset.h5", "training/checkpoints", "evaluation.json", "report.html")


def demo(out: Path, config: Config = CONFIG, fresh: bool = False) -> tuple[dict[str, Rate], str]:
    """The demo's rates, and what it said."""
    console = Console(file=io.StringIO(), width=200)
    rates = run_demo(config, out, fresh, console)
    assert isinstance(console.file, io.StringIO)
    return rates, console.file.getvalue()


def without_times(evaluation: bytes) -> dict[str, Any]:
    """What an evaluation found, but not how long it took; nor the checksum of both."""
    document: dict[str, Any] = json.loads(evaluation)
    assert document.pop("checksum")
    assert document.pop("times")["plans"] > 0
    return document


def state_of(out: Path, *names: str) -> dict[Path, tuple[int, bytes]]:
    """When each file was last written, and with what."""
    files = [p for name in names for p in ((out / name).rglob("*") if (out / name).is_dir() else [out / name])]
    assert files
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Rate]]:
    out = tmp_path_factory.mktemp("demo") / "new"
    return out, demo(out)[0]


def test_everything_appears(finished: tuple[Path, dict[str, Rate]]):
    out, rates = finished
    assert {path.name for path in out.iterdir()} >= {"dataset.h5", "training", "evaluation.json", "report.html"}
    assert [path.name for path in out.rglob("step_0000008")] == ["step_0000008"]
    document = json.loads((out / "evaluation.json").read_text())
    assert document["rates"] == {name: rate.to_dict() for name, rate in rates.items()}
    assert list(rates) == list(LABELS)
    assert {rate.total for name, rate in rates.items() if "strict" not in name} == {CONFIG.eval.episodes}
    html = (out / "report.html").read_text()
    assert "</html>" in html
    # The way to what the model has understood, and how that page is made.
    assert 'href="understanding/report.html"' in html
    assert f"lewm understand {out / 'training'} --out {out / 'understanding'}" in html


def test_a_second_call_reuses_everything(finished: tuple[Path, dict[str, Rate]]):
    out, rates = finished
    before = state_of(out, *REUSED)
    again, said = demo(out)
    assert again == rates
    assert "(0 new)" in said
    assert state_of(out, *REUSED) == before


def test_a_demo_of_an_earlier_version_is_reused(finished: tuple[Path, dict[str, Rate]]):
    """Its files do not have the settings that came later, which had today's defaults without a name."""
    out, rates = finished
    now = (out / "evaluation.json").read_text()
    document = json.loads(now)
    del document["checksum"]
    del document["config"]["collect"]["exploration"]
    (out / "evaluation.json").write_text(json.dumps(document))
    assert demo(out)[0] == rates
    (out / "evaluation.json").write_text(now)


def test_a_missing_part_is_made_again(finished: tuple[Path, dict[str, Rate]]):
    out, rates = finished
    before = state_of(out, "dataset.h5", "training/checkpoints")
    old = (out / "evaluation.json").read_bytes()
    (out / "evaluation.json").unlink()
    assert demo(out)[0] == rates
    assert without_times((out / "evaluation.json").read_bytes()) == without_times(old)
    assert state_of(out, "dataset.h5", "training/checkpoints") == before


def test_a_missing_report_is_made_from_the_same_evaluation(finished: tuple[Path, dict[str, Rate]]):
    out, rates = finished
    before = state_of(out, *REUSED[:3])
    (out / "report.html").unlink()
    assert demo(out)[0] == rates
    assert state_of(out, *REUSED[:3]) == before
    assert (out / "report.html").is_file()


def test_rates_of_an_earlier_model_are_not_those_of_another(tmp_path: Path):
    """As after a training elsewhere, or by another version: other weights with the same settings."""
    out = tmp_path / "demo"
    demo(out)
    shutil.rmtree(out / "training")
    steep = replace(CONFIG, data=out / "dataset.h5", out=out / "training", train=replace(CONFIG.train, lr=0.01))
    train(steep)
    for path in (out / "training" / "config.json", out / "training" / "checkpoints" / "step_0000008" / "config.json"):
        document = json.loads(path.read_text())
        document.get("run", document)["train"]["lr"] = CONFIG.train.lr
        document.pop("checksum", None)
        if "digest" in document:
            del document["digest"]
            document["digest"] = json_digest(document)
        path.write_text(json.dumps(document))
    before = state_of(out, *REUSED)
    with pytest.raises(LewmError, match=r"evaluation\.json has the rates of another model than .*step_0000008"):
        demo(out)
    assert state_of(out, *REUSED) == before
    (out / "evaluation.json").unlink()
    demo(out)
    digest = json.loads((out / "evaluation.json").read_text())["checkpoint"]["weights_sha256"]
    assert digest == file_digest(out / "training" / "checkpoints" / "step_0000008" / "model.safetensors")


def test_starting_over_gives_the_same_figures_and_spares_other_files(finished: tuple[Path, dict[str, Rate]]):
    out, rates = finished
    note = out / "my-notes.txt"
    note.write_text("mine")
    before = state_of(out, *REUSED)
    again, said = demo(out, fresh=True)
    assert again == rates
    assert "(8 new)" in said
    assert note.read_text() == "mine"
    after = state_of(out, *REUSED)
    assert after.keys() == before.keys()
    for path in after:
        assert after[path][0] > before[path][0], f"{path} was not made again"
        old, new = (content for _, content in (before[path], after[path]))
        if path.name == "evaluation.json":
            assert without_times(new) == without_times(old)
        else:
            assert new == old or path.name == "report.html", f"{path} came out different"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset.h5", "a thesis"),
        ("training/thesis.tex", "a thesis"),
        ("evaluation.json", '{"mine": 1}'),
        ("report.html", "a thesis"),
    ],
)
@pytest.mark.parametrize("fresh", [False, True])
def test_what_no_demo_wrote_stays(tmp_path: Path, name: str, content: str, fresh: bool):
    """And is said before there is any work."""
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(content)
    with pytest.raises(LewmError, match=name.split("/")[0]):
        demo(tmp_path, fresh=fresh)
    assert (tmp_path / name).read_text() == content
    made = {path.name for path in tmp_path.iterdir()} - {name.split("/")[0]}
    assert made <= ({"dataset.h5"} if name == "training/thesis.tex" and not fresh else set())


def test_starting_over_spares_names_like_its_own_and_what_others_write(finished: tuple[Path, dict[str, Rate]]):
    out, _ = finished
    copy = out / "dataset.h5.my-copy"
    copy.write_text("mine")
    before = state_of(out, *REUSED)
    for lock in (out / "training" / ".lock", out / "dataset.h5.lock"):
        with only_writer(lock, ""), pytest.raises(LewmError, match="Another process is"):
            demo(out, fresh=True)
    assert state_of(out, *REUSED) == before
    demo(out, fresh=True)
    assert copy.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "seed"),
        ({"train": replace(CONFIG.train, lr=0.5)}, r"train\.lr"),
        ({"plan": replace(CONFIG.plan, samples=16)}, "--fresh"),
    ],
)
def test_other_settings_in_the_same_folder_are_refused(
    finished: tuple[Path, dict[str, Rate]], change: dict[str, Any], message: str
):
    out, _ = finished
    before = state_of(out, *REUSED)
    with pytest.raises(LewmError, match=message):
        demo(out, replace(CONFIG, **change))
    assert state_of(out, *REUSED) == before
