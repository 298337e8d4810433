"""The report page: complete, self-contained, true to its evaluation, and readable in a browser."""

import base64
import errno
import io
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from lewm.errors import FileError
from lewm.evaluate import animation
from lewm.evaluate.animation import episodes_gif
from lewm.evaluate.episodes import Task, run_episodes
from lewm.evaluate.policies import RandomPolicy
from lewm.evaluate.report import _curve_charts, choose_episodes, write_report
from lewm.evaluate.results import LABELS, Evaluation
from lewm.presets import preset
from lewm.types import EpisodeResult, EpisodeSpec, Plan

# In the order of the pairs: out of reach, solved before it began, and near enough to stumble upon.
SPECS = (
    EpisodeSpec(0, (40.0, 180.0), (190.0, 180.0)),
    EpisodeSpec(1, (60.0, 60.0), (60.0, 60.0)),
    EpisodeSpec(2, (60.0, 150.0), (60.0, 168.0)),
)
BUDGET = 20
METRICS = [
    {
        "step": step,
        "loss": 1.5 / step,
        "prediction_loss": 1 / step,
        "sigreg_loss": 5 / step,
        "learning_rate": 1e-3,
        "embedding_std": 1 - 1 / step,
        "effective_rank": 2.0 + step,
        "straightness": 0.1 * step,
        "steps_per_second": 10.0,
    }
    for step in (2, 4, 6)
] + [{"step": 6, "val/loss": 0.3, "val/prediction_loss": 0.2, "val/sigreg_loss": 0.9}]
SECTIONS = {"result", "training", "episodes", "imagination", "run", "outcomes"}
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    """Three TwoRoom episodes under random actions, the last two solved, with two made-up plans each."""
    plans = tuple(
        Plan(np.zeros((25, 2), np.float32), cost, np.linspace(9 * cost, cost, 5, dtype=np.float32))
        for cost in (0.5, 0.125)
    )
    played = run_episodes(RandomPolicy(11), Task("tworoom", SPECS, BUDGET))
    assert [r.success for r in played] == [False, True, True]
    config = preset("debug")
    config = replace(config, eval=replace(config.eval, budget=BUDGET))
    results = tuple(replace(result, plans=plans) for result in played)
    # Declared failures, so that the rates differ and a page that mixes them up is noticed.
    random_results = tuple(replace(result, reached=np.zeros_like(result.reached)) for result in played)
    return Evaluation(config, 25, results, random_results)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory, evaluation: Evaluation) -> str:
    """The report of that evaluation, in a folder that was not there before."""
    path = tmp_path_factory.mktemp("report") / "new" / "report.html"
    assert write_report(path, evaluation, METRICS, {"Parameters": "1,234"}) == path
    assert list(path.parent.iterdir()) == [path]
    return path.read_text()


class Page(HTMLParser):
    """What the tests ask of a page: its tags and attributes, its text, its text by section."""

    VOID = frozenset({"meta", "link", "img"})

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.sections: dict[str, str] = {}
        self._open: list[str] = []
        self._section = ""
        self.feed(html)
        self.close()
        assert self._open == [], "unclosed tags"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "section":
            self._section = dict(attrs)["id"] or ""

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.sections[self._section] = self.sections.get(self._section, "") + data

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.tags)


def gif_in(html: str) -> bytes:
    match = re.search(r"data:image/gif;base64,([^\"]+)", html)
    assert match
    return base64.b64decode(match[1])


def test_page_is_well_formed_and_needs_nothing_else(html: str):
    page = Page(html)
    assert set(page.sections) >= SECTIONS
    assert page.count("script") == 0
    assert "http:" not in html
    assert "https:" not in html
    for tag, attributes in page.tags:
        for name in ("src", "href", "xlink:href"):
            assert (attributes.get(name) or "#").startswith(("data:", "#")), (tag, attributes)
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert all(a.get("alt") for tag, a in page.tags if tag == "img")
    assert all(a.get("aria-label") for tag, a in page.tags if tag == "svg")


def test_numbers_are_the_evaluations(html: str, evaluation: Evaluation):
    page = Page(html)
    result = page.sections["result"]
    assert "66.7\xa0%" in result
    labels = {attributes.get("aria-label") for _, attributes in page.tags}
    rates = evaluation.rates()
    assert [rate.successes for rate in rates.values()] == [2, 1, 0, 0, 1]
    for name, rate in rates.items():
        assert f"{LABELS[name].capitalize()}: {rate}" in labels
        assert str(rate) in result
        assert f"width:{100 * rate.value:.2f}%" in html
    assert "3 pairs" in result
    assert "25 steps after its start" in result
    assert f"within {BUDGET} actions" in result
    outcomes = page.sections["outcomes"]
    assert page.count("tr") == 1 + len(SPECS)
    assert f"not reached in {BUDGET} steps" in outcomes
    for solved in evaluation.results[1:]:
        assert f"solved at step {solved.first_success}" in outcomes
    assert "0.125" in outcomes
    assert "1,234" in page.sections["run"]
    assert f'"budget": {BUDGET}' in page.sections["run"]
    assert "Shown: 2 of 2 solved and 1 of 1 failed episodes." in page.sections["episodes"]


def test_a_chart_for_every_curve_and_every_episode(html: str):
    page = Page(html)
    training, imagined = page.sections["training"], page.sections["imagination"]
    assert page.count("svg") == 6 + len(SPECS)
    # Three losses have a validation curve and so a legend; each episode names its two plans.
    assert training.count("validation") == 3
    assert imagined.count("plan 2") == len(SPECS)
    assert imagined.count("steps ahead") == 1 + len(SPECS)


def test_gif_has_a_frame_per_step_and_ends_green_or_red(html: str, evaluation: Evaluation):
    gif_bytes = gif_in(html)
    assert gif_bytes == episodes_gif("tworoom", evaluation.results)
    gif = Image.open(io.BytesIO(gif_bytes))
    frames = [frame.convert("RGB") for frame in ImageSequence.Iterator(gif)]
    assert len(frames) == max(len(r.states) for r in evaluation.results) == BUDGET + 1
    assert gif.info["loop"] == 0
    durations = [frame.info["duration"] for frame in ImageSequence.Iterator(gif)]
    assert durations == [animation.FRAME_MS] * BUDGET + [animation.HOLD_MS]

    def pixels(frame: Image.Image, colour: tuple[int, int, int]) -> int:
        return int((np.abs(np.asarray(frame, int) - colour).max(-1) < 8).sum())

    border = 4 * animation.BORDER * (animation.RESOLUTION + animation.BORDER)
    assert [pixels(f, animation.FAILED) >= border for f in frames] == [False] * BUDGET + [True]
    for step, frame in enumerate(frames):
        solved = sum(r.success and r.first_success <= step for r in evaluation.results)
        # Captions add a little of the colour, less than another frame would.
        assert solved * border <= pixels(frame, animation.SOLVED) < (solved + 1) * border


def test_gif_shows_start_goal_and_the_states(evaluation: Evaluation):
    result = evaluation.results[0]
    gif = Image.open(io.BytesIO(episodes_gif("tworoom", [result])))
    side = animation.RESOLUTION
    for step, frame in enumerate(ImageSequence.Iterator(gif)):
        picture = np.asarray(frame.convert("RGB"), int)
        top = animation.MARGIN + animation.CAPTION
        for i, state in enumerate((SPECS[0].start, SPECS[0].goal, result.states[step])):
            left = animation.MARGIN + i * (side + animation.GAP)
            shown = picture[top : top + side, left : left + side]
            redness = shown[:, :, 0] - shown[:, :, 1]
            y, x = np.unravel_index(redness.argmax(), redness.shape)
            assert np.abs((np.array([x, y]) + 0.5) * 224 / side - state).max() < 4


def test_text_is_escaped(tmp_path: Path, evaluation: Evaluation):
    summary = {"<script>alert(1)</script>": "<script>alert('2')</script> & more"}
    html = write_report(tmp_path / "report.html", evaluation, METRICS, summary).read_text()
    assert "<script" not in html
    page = Page(html)
    assert page.count("script") == 0
    assert "<script>alert('2')</script> & more" in page.sections["run"]


def test_without_a_training_record(tmp_path: Path, evaluation: Evaluation):
    page = Page(write_report(tmp_path / "report.html", evaluation, [], {}).read_text())
    assert "no training record" in page.sections["training"]
    assert page.count("svg") == len(SPECS)


def test_without_plans(tmp_path: Path, evaluation: Evaluation):
    bare = replace(evaluation, results=evaluation.random_results)
    page = Page(write_report(tmp_path / "report.html", bare, METRICS, {}).read_text())
    assert "without plans" in page.sections["imagination"]


def test_losses_below_zero_are_drawn():
    """As those of methods that act: a logarithmic axis would leave them out."""
    rows = [{"step": step, "loss": 1.0 - step} for step in (1, 2, 3)]
    curves = re.findall(r'<path d="(M [^"]*)"[^>]*clip-path', _curve_charts(rows))
    (points,) = (re.findall(r"[ML] (\S+) (\S+)", curve) for curve in curves if curve.count("L ") == 2)
    assert len({height for _, height in points}) == 3


def test_distances_that_are_no_numbers_are_not_drawn(tmp_path: Path, evaluation: Evaluation):
    nowhere = Plan(np.zeros((25, 2), np.float32), np.nan, np.array([1.0, 2.0, np.inf, np.nan, np.nan], np.float32))
    first, *rest = evaluation.results
    for plans in ((nowhere, *first.plans), (replace(nowhere, distances=np.full(5, np.nan, np.float32)),)):
        diverged = replace(evaluation, results=(replace(first, plans=plans), *rest))
        page = Page(write_report(tmp_path / "report.html", diverged, METRICS, {}).read_text())
        assert page.count("svg") == 6 + len(SPECS)


def test_same_evaluation_same_page(tmp_path: Path, html: str, evaluation: Evaluation):
    assert write_report(tmp_path / "again.html", evaluation, METRICS, {"Parameters": "1,234"}).read_text() == html


def test_a_failing_write_leaves_the_old_report(tmp_path: Path, evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "report.html"
    path.write_text("<html>the old report</html>")
    write_text = Path.write_text

    def fill_the_disk(self: Path, data: str, encoding: str | None = None) -> int:
        write_text(self, data[:100], encoding=encoding)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", fill_the_disk)
    with pytest.raises(FileError, match="disk is full"):
        write_report(path, evaluation, METRICS, {})
    assert path.read_text() == "<html>the old report</html>"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("solved", "failed", "shown_solved", "shown_failed"),
    [(50, 0, 8, 0), (49, 1, 7, 1), (25, 25, 6, 2), (1, 49, 1, 7), (0, 50, 0, 8), (2, 1, 2, 1), (0, 1, 0, 1)],
)
def test_shown_episodes_include_failures(solved: int, failed: int, shown_solved: int, shown_failed: int):
    results = [
        EpisodeResult(i, False, np.arange(3) == (1 if i < solved else 3), np.zeros(2), np.zeros((4, 2)))
        for i in range(solved + failed)
    ]
    shown = choose_episodes(results)
    assert sum(r.success for r in shown) == shown_solved
    assert sum(not r.success for r in shown) == shown_failed
    assert len({r.index for r in shown}) == len(shown)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium, chromium-browser or google-chrome on the PATH")
def test_a_browser_shows_it(tmp_path: Path, html: str, evaluation: Evaluation):
    path = tmp_path / "report.html"
    path.write_text(html)
    screenshot = tmp_path / "page.png"
    assert CHROMIUM is not None
    quiet = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking"
    quiet += " --disable-component-update --disable-sync --hide-scrollbars"
    command = [CHROMIUM, *quiet.split(), f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1100,2400"]
    subprocess.run([*command, f"--screenshot={screenshot}", path.as_uri()], check=True, capture_output=True, timeout=60)
    dom = subprocess.run(
        [*command, "--dump-dom", path.as_uri()], check=True, capture_output=True, text=True, timeout=60
    ).stdout
    assert str(evaluation.rates()["policy"]) in dom
    with Image.open(screenshot) as image:
        picture = np.asarray(image.convert("RGB"), int)
    assert picture.shape == (2400, 1100, 3)
    # The GIF's dark backdrop and the agent's red dots: not only text was drawn, pictures too.
    assert (np.abs(picture - animation.BACKGROUND).max(-1) < 8).sum() > 20_000
    assert ((picture[:, :, 0] > 200) & (picture[:, :, 1] < 60)).sum() > 100
