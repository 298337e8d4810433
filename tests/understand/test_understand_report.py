"""The page of all that fits: every section is there, it needs nothing else, and a real browser shows it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lewm import cli
from lewm.config import CollectConfig, Config
from lewm.data.collect import collect
from lewm.errors import ConfigError, DataError
from lewm.presets import preset
from lewm.train.loop import train
from lewm.understand import landscape as landscape_verb
from lewm.understand.findings import Findings
from lewm.understand.report import PARTS, check_parts, investigate_all, write_report
from lewm.understand.subject import open_episodes, open_subject

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# What is asked here; others have tests of their own, and need a decoder, or take long.
ASKED = ("map", "imagine", "straightness", "landscape", "notice")
SKIPPED = tuple(part.verb for part in PARTS if part.verb not in ASKED)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "episodes.h5"
    collect("tworoom", path, CollectConfig(episodes=6, resolution=28, workers=1, frame_stride=5), 4)
    return path


def make(run: Path, data: Path, out: Path, **changes: Any) -> Path:
    subject = open_subject(run, "cpu")
    with open_episodes(data, subject) as store:
        options = {"quick": True, "skip": SKIPPED} | changes
        return write_report(out, subject, store, list(investigate_all(subject, store, out, **options)))


@pytest.fixture(scope="module")
def page(debug_run: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(debug_run, data, tmp_path_factory.mktemp("report") / "new")


class Tags(HTMLParser):
    """Tags with their attributes, and what is not closed."""

    VOID = frozenset({"meta", "link", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def every(self, tag: str, attribute: str) -> list[str]:
        return [
            attributes[attribute] or "" for name, attributes in self.tags if name == tag and attribute in attributes
        ]


def test_every_section_is_there_and_nothing_else_is_needed(page: Path) -> None:
    html = page.read_text()
    tags = Tags(html)
    assert tags.open == []
    assert tags.every("section", "id") == [*ASKED, "looked-at"]
    assert tags.every("a", "href") == [f"#{verb}" for verb in ASKED]
    assert len(tags.every("img", "src")) == len(ASKED) + 1, "a figure each, and pictures of states"
    assert all(source.startswith("data:image/png;base64,") for source in tags.every("img", "src"))
    assert all(tags.every("img", "alt"))
    assert "<script" not in html
    assert not re.search(r"https?:", html)
    assert "NaN" not in re.sub(r"base64,[^\"]+", "", html)
    for words in ("rank correlation", "if nothing moved", "agent moved", "blocks apart", "lewm/TwoRoom-v0"):
        assert words in html


def test_a_part_that_cannot_stops_no_other(
    debug_run: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> Findings:
        raise DataError("The <sky> is too high.")

    monkeypatch.setattr(landscape_verb, "investigate", refuse)
    monkeypatch.setattr("lewm.understand.straightness.fits", lambda _: "it is crooked")
    keep = {"straightness", "landscape", "map"}
    html = make(debug_run, data, tmp_path, skip=[p.verb for p in PARTS if p.verb not in keep]).read_text()
    assert Tags(html).every("section", "id") == ["map", "left-out", "looked-at"]
    assert "<b>landscape</b>: The &lt;sky&gt; is too high." in html
    assert "<b>straightness</b>: it is crooked" in html


def test_an_unknown_part_is_named() -> None:
    with pytest.raises(ConfigError, match="landscape"):
        check_parts(["landscap"])


def test_a_second_call_asks_nothing_again(page: Path, debug_run: Path, data: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in page.parent.glob("*.json")}
    html = page.read_text()
    assert make(debug_run, data, page.parent).read_text() == html
    assert {path: path.stat().st_mtime_ns for path in page.parent.glob("*.json")} == before


def test_another_model_is_asked_anew(page: Path, debug_run: Path, data: Path, tmp_path: Path) -> None:
    shutil.copytree(page.parent, tmp_path / "copy")
    subject = replace(open_subject(debug_run, "cpu"), digest="0" * 64)
    with open_episodes(data, subject) as store:
        skip = [part.verb for part in PARTS if part.verb != "landscape"]
        (section,) = investigate_all(subject, store, tmp_path / "copy", skip=skip)
    assert section.found is not None
    assert section.found.question["model"] == "0" * 64


@pytest.mark.parametrize("method", ["pldm", "dino_wm"])
def test_other_methods_are_asked_the_same(method: str, debug_config: Config, data: Path, tmp_path: Path) -> None:
    config = replace(preset("debug", method), data=debug_config.data, device="cpu", out=tmp_path / "run")
    train(replace(config, train=replace(config.train, steps=4)))
    html = make(tmp_path / "run", data, tmp_path / "out").read_text()
    assert Tags(html).every("section", "id") == [*ASKED, "looked-at"]
    assert ("tokens are averaged" in html) == (method == "dino_wm")


WORLD_OF_ONES_OWN = """
from lewm import cli
for arguments in (
    "collect puck --episodes 20 --resolution 28 --workers 1 --out puck.h5",
    "train debug --env puck --data puck.h5 --out run --train.steps 4 --device cpu",
    "understand run --data puck.h5 --out found --quick --skip probe --skip surprise --device cpu",
    "understand map run --x x --y y --x-range -0.8 0.8 --grid 5 --out found --device cpu",
):
    assert cli.run(arguments.split()) == 0, arguments
"""


@pytest.mark.slow
def test_a_world_of_ones_own(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guide" / "add-an-environment.md").read_text(encoding="utf-8")
    example = guide.split("## A whole one", 1)[1].split("```python\n", 1)[1].split("```", 1)[0]
    (tmp_path / "my_world.py").write_text(example)
    environment = os.environ | {"LEWM_ENVS": "my_world"}
    command = [sys.executable, "-P", "-c", WORLD_OF_ONES_OWN]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    html = (tmp_path / "found" / "report.html").read_text()
    assert "standard deviations" in html, "each number of the state is changed"
    assert "<b>map</b>: which numbers of puck" in html
    assert "x, y" in (tmp_path / "found" / "map.md").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(page: Path, tmp_path: Path, scheme: str) -> None:
    screenshot = tmp_path / "page.png"
    assert CHROMIUM is not None
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --hide-scrollbars"
    quiet += " --force-dark-mode --blink-settings=preferredColorScheme=0" if scheme == "dark" else ""
    command = [CHROMIUM, *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,2400"]
    subprocess.run([*command, f"--screenshot={screenshot}", page.as_uri()], check=True, capture_output=True, timeout=60)
    with Image.open(screenshot) as image:
        picture = np.asarray(image.convert("RGB"), int)
    ground = {"light": (246, 245, 241), "dark": (17, 20, 26)}[scheme]
    assert (np.abs(picture[:, 5] - ground).max(-1) < 8).mean() > 0.9
    blue = np.array([0, 114, 178])  # of curves and map: pictures are drawn
    assert (np.abs(picture - blue).max(-1) < 40).sum() > 200
    # Text can be told from its ground.
    assert picture[:, 40:1000].std() > 30


def test_the_command_writes_it_and_says_what_it_left_out(
    debug_run: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    skip = [f"--skip={verb}" for verb in (*SKIPPED, "imagine", "notice")]
    before = signal.getsignal(signal.SIGTERM)
    arguments = ["understand", str(debug_run), "--data", str(data), "--out", str(tmp_path), "--quick", *skip]
    assert cli.run([*arguments, "--device=cpu"]) == 0
    signal.signal(signal.SIGTERM, before)
    said = " ".join(capsys.readouterr().out.split())
    assert "map: How the latent space lays out states" in said
    assert "report.html" in said
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_a_killed_report_goes_on(debug_run: Path, data: Path, tmp_path: Path) -> None:
    """Parts that are done are not done again, and no half-written file stays."""
    skip = [f"--skip={verb}" for verb in SKIPPED]
    arguments = ["understand", str(debug_run), "--data", str(data), "--out", str(tmp_path), *skip, "--device=cpu"]
    running = subprocess.Popen([sys.executable, "-m", "lewm", *arguments], stdout=subprocess.DEVNULL)
    while not (tmp_path / "map.json").is_file() and running.poll() is None:
        time.sleep(0.02)
    running.kill()
    running.wait()
    first = (tmp_path / "map.json").stat().st_mtime_ns
    assert not (tmp_path / "report.html").exists()
    assert subprocess.run([sys.executable, "-m", "lewm", *arguments], stdout=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "map.json").stat().st_mtime_ns == first
    assert (tmp_path / "report.html").is_file()
    assert not list(tmp_path.glob(".*.tmp"))
