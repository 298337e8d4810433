"""What the documentation says is there, and it is said in short sentences.

The guides (docs/guide) tell how to do something; the notebook (docs/notebook) tells what was tried and when.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from lewm.cli.collect import CollectArgs
from lewm.cli.eval import EvalArgs
from lewm.cli.export import ExportArgs
from lewm.cli.understand.probe import ProbeArgs
from lewm.config import Config
from lewm.methods.registry import METHODS, method_config

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs" / "guide").glob("*.md"))
NOTEBOOK = sorted((ROOT / "docs" / "notebook").glob("*.md"))
LEFT = ROOT / "docs" / "notebook" / "left-the-tree.md"
CARDS = sorted((ROOT / "pretrained").glob("*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES, *NOTEBOOK]
MOST_WORDS = 25

CODE_BLOCK = re.compile(r"^ *```.*?^ *```$", re.M | re.S)


def named(paths: list[Path]) -> pytest.MarkDecorator:
    """One test for each page."""
    return pytest.mark.parametrize("page", paths, ids=[str(path.relative_to(ROOT)) for path in paths])


def test_there_are_guides_and_a_notebook_and_nothing_beside_them() -> None:
    assert len(GUIDES) >= 8
    assert len(NOTEBOOK) >= 8
    assert sorted(path.name for path in (ROOT / "docs").iterdir() if path.is_dir()) == ["guide", "notebook"]
    assert list((ROOT / "docs").glob("*.md")) == []


# -- sentences ---------------------------------------------------------------------------------------------------------


def sentences(text: str) -> list[str]:
    """The sentences of a page, without code blocks, tables, headings, pictures and the targets of links."""
    prose = CODE_BLOCK.sub("\n\n", text)
    prose = re.sub(r"^ *\|[^\n]*$|^#[^\n]*$|!\[[^\]]*\]\([^)]*\)", "\n", prose, flags=re.M)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    parts = re.split(r"(?<=[.!?:])\s+|\n\s*\n|\n\s*(?:[-*>]|\d+\.)\s", prose)
    return [part for part in (re.sub(r"^\s*[-*>]\s", "", part) for part in parts) if part.strip()]


def too_long(text: str) -> list[str]:
    return [" ".join(s.split()) for s in sentences(text) if len(s.split()) > MOST_WORDS]


@named(PAGES)
def test_sentences_are_short(page: Path) -> None:
    assert too_long(page.read_text(encoding="utf-8")) == []


def test_long_sentences_are_found_wherever_they_stand() -> None:
    long = "word " * MOST_WORDS + "end."
    for text in (
        long,
        f"Short. {long}",
        f"- one\n- {long}\n",
        f"> {long}",
        f"[link](a.md) {long[5:]}",
        f"A:\n\n{long}",
    ):
        assert len(too_long(text)) == 1, text
    for text in (long[5:], f"```\n{long}\n```\n", f"| {long} |", f"# {long}", f"- {long[5:]}\n- {long[5:]}"):
        assert too_long(text) == [], text


RECORDED_GRAPH = re.compile(r"\brecord\w*\s+(?:\w+\s+){0,4}graphs?\b|\bgraphs?\s+(?:\w+\s+){0,3}record")


@named([*PAGES, ROOT / "CHANGELOG.md"])
def test_one_word_for_one_thing(page: Path) -> None:
    """Actions of a dataset are recorded; CUDA graphs are captured."""
    text = page.read_text(encoding="utf-8")
    assert RECORDED_GRAPH.findall(text) == []
    assert "manieth" not in text


def test_recorded_graphs_are_found() -> None:
    for wrong in ("a recorded graph", "recorded as one CUDA graph", "a graph that is recorded"):
        assert RECORDED_GRAPH.search(wrong)
    assert not RECORDED_GRAPH.search("actions are recorded, CUDA graphs are captured")


# -- links and paths ---------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """What a link to a part of a page may name: its headings, as GitHub writes them."""
    titles = re.findall(r"^#+ +(.*?)\s*$", CODE_BLOCK.sub("", text), re.M)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in titles]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in plain}


def broken_links(page: Path, text: str) -> list[str]:
    """Targets of relative links that lead nowhere."""
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", CODE_BLOCK.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        there = file.is_relative_to(ROOT) and file.exists()
        if there and anchor:
            there = anchor in anchors(file.read_text(encoding="utf-8") if name else text)
        if not there:
            broken.append(target)
    return broken


@named([*PAGES, *CARDS, ROOT / "CHANGELOG.md"])
def test_links_lead_somewhere(page: Path) -> None:
    assert broken_links(page, page.read_text(encoding="utf-8")) == []


def test_broken_links_are_found() -> None:
    text = "## A heading, `code`\n[good](README.md) [good](#a-heading-code) [web](https://a.b/c) "
    bad = ["NONE.md", "#none", "README.md#none", "../outside.md"]
    assert broken_links(ROOT / "README.md", text + " ".join(f"[bad]({target})" for target in bad)) == bad


PATH = re.compile(r"(?<![\w./-])((?:lewm|benchmarks|scripts|tests|runs)/[\w./-]*[\w/])")


def paths_named(text: str) -> Iterator[str]:
    """Files and folders of the tree that a text names. What is under runs/ is of the tree if it is a script."""
    for name in PATH.findall(text):
        if "NAME" in name:  # any of several
            continue
        if name.startswith("runs/") and Path(name).suffix not in (".sh", ".sbatch"):
            continue
        if not re.search(r"-v\d+$", name):  # ids of environments look like paths
            yield name


def test_pages_that_the_code_names_exist() -> None:
    files = [file for part in ("lewm", "benchmarks", "tests") for file in (ROOT / part).rglob("*.py")]
    files += [*(ROOT / "runs").glob("*.sh"), *(ROOT / "pretrained").glob("*/README.md"), ROOT / "CHANGELOG.md"]
    named_in = {(file, name) for file in files for name in re.findall(r"\bdocs/[\w./-]*\w", file.read_text("utf-8"))}
    assert len(named_in) > 10
    assert [(file, name) for file, name in sorted(named_in) if not (ROOT / name).exists()] == []


def departed() -> dict[str, str]:
    """What has left the tree, and the commit where it can still be found."""
    return dict(re.findall(r"^\| `([^`]+)` \| `([0-9a-f]{7,40})` \|", LEFT.read_text(encoding="utf-8"), re.M))


@named([*PAGES, *CARDS])
def test_paths_that_are_named_exist(page: Path) -> None:
    """In the notebook also what has left: experiments stay readable, with the commit that has them."""
    gone = set(departed()) if page in NOTEBOOK else set()
    missing = {name for name in paths_named(page.read_text(encoding="utf-8")) if not (ROOT / name).exists()}
    assert missing <= gone


def test_paths_are_recognised() -> None:
    text = "`lewm/PushT-v0` runs `lewm/none.py`, see benchmarks/none.py. `runs/x.json`, runs/none.sh, lewm/kernels/"
    assert list(paths_named(text)) == ["lewm/none.py", "benchmarks/none.py", "runs/none.sh", "lewm/kernels/"]


def test_what_has_left_can_still_be_found() -> None:
    found = departed()
    assert len(found) >= 5
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    for path, commit in found.items():
        if subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True).returncode:
            pytest.skip("a shallow checkout")
        assert not (ROOT / path).exists(), f"{path} is here"
        assert subprocess.run(["git", "cat-file", "-e", f"{commit}:{path}"], cwd=ROOT).returncode == 0, path


@named([*GUIDES, *NOTEBOOK])
def test_every_page_is_reached_from_the_readme(page: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(rf"\]\({re.escape(str(page.relative_to(ROOT)))}(#[\w-]+)?\)", readme)


# -- the notebook ------------------------------------------------------------------------------------------------------

HEAD = re.compile(r"# [^\n]+\n\n(\d{4}-\d\d-\d\d)(?: to (\d{4}-\d\d-\d\d))?\n\n(?:- [^\n]+\n){3}\n(?!- )")


@named(NOTEBOOK)
def test_pages_of_the_notebook_begin_with_date_and_conclusion(page: Path) -> None:
    """A title, a date or two, and three lines: whoever reads no further knows what came of it."""
    head = HEAD.match(page.read_text(encoding="utf-8"))
    assert head is not None
    first, last = head.groups()
    assert "2026" <= first <= (last or first)


def test_a_page_without_date_or_conclusion_is_found() -> None:
    good = "# Title\n\n2026-11-15 to 2026-11-18\n\n- One.\n- Two.\n- Three.\n\nText.\n"
    assert HEAD.match(good)
    for part in ("2026-11-15 to 2026-11-18\n\n", "- Two.\n", "# Title\n\n"):
        assert not HEAD.match(good.replace(part, ""))


# -- the paper's comparison -------------------------------------------------------------------------------------------

GENERATED = re.compile(r"<!-- begin \S+ -->.*?<!-- end \S+ -->", re.S)


def unfounded(text: str) -> list[str]:
    """Shares that the prose of a page names, and that are in none of its generated tables."""
    made = " ".join(GENERATED.findall(text))
    prose = GENERATED.sub("", text).replace("interval at 95 %", "")
    return [share for share in re.findall(r"([\d.]+) %", prose) if f" {share} [" not in made]


def test_figures_of_the_comparison_are_generated() -> None:
    """What is said about the tables is in them."""
    assert unfounded((ROOT / "docs" / "notebook" / "comparison.md").read_text(encoding="utf-8")) == []


def test_figures_that_were_not_generated_are_found() -> None:
    table = "<!-- begin paper -->\n| a | 97.5 [94.3, 98.9] |\n<!-- end paper -->"
    assert unfounded(f"It solves 97.5 %, not 98.9 % or 7.5 %.\n{table}") == ["98.9", "7.5"]


def test_commands_of_the_comparison_name_no_place_of_one_machine() -> None:
    record = ROOT / "runs" / "paper" / "results_paper.json"
    for file in (ROOT / "README.md", ROOT / "docs" / "notebook" / "comparison.md", record):
        assert re.findall(r"[\s\"`](/[\w.-]+/[\w./-]+)", file.read_text(encoding="utf-8")) == [], file


# -- flags -------------------------------------------------------------------------------------------------------------


def flags(kind: type, prefix: str = "") -> Iterator[str]:
    """The flags of a dataclass of settings, nested ones included."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name.replace("_", "-"), hints[field.name]
        yield f"--{name}"
        yield f"--{prefix}no-{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from flags(hint, f"{name}.")


def known_flags() -> set[str]:
    found = {flag for kind in (Config, CollectArgs, EvalArgs, ExportArgs, ProbeArgs) for flag in flags(kind)}
    for name in METHODS:
        found |= set(flags(method_config(name), "method."))
    return found | {"--method", "--resume", "--help"}


@named([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *GUIDES])
def test_settings_that_are_named_exist(page: Path) -> None:
    """`--section.setting` of the guides is a flag of today; a notebook may name those of its time."""
    text = page.read_text(encoding="utf-8")
    unknown = set(re.findall(r"(?<![\w-])--[a-z]+\.[a-z.-]*[a-z]", text)) - known_flags()
    own = {"--method.width"} if page.name == "add-a-method.md" else set()  # its example's
    assert unknown <= own


def test_settings_that_do_not_exist_are_found() -> None:
    assert {
        "--plan.icem.recorded",
        "--method.sigreg.weight",
        "--train.no-fused",
        "--method.goal-steps",
    } <= known_flags()
    assert not {"--plan.recorded", "--sigreg.weight", "--train.coarse-steps"} & known_flags()


# -- examples that no other test follows -------------------------------------------------------------------------------


def test_the_solver_of_the_guide_finds_an_optimum() -> None:
    torch = pytest.importorskip("torch")
    from lewm.plan.solver import Problem, solve

    text = (ROOT / "docs" / "guide" / "add-a-solver.md").read_text(encoding="utf-8")
    found: dict[str, typing.Any] = {}
    exec(re.findall(r"```python\n(.*?)```", text, re.S)[0], found)
    target_BHA = torch.tensor([[[0.5, -1.0], [1.0, 0.2]]])
    problem = Problem(lambda plans: (plans - target_BHA[:, None]).square().sum((-2, -1)), 2, 2, torch.tensor([3]))
    assert (solve(found["Closer"](), problem) - target_BHA).abs().max() < 0.1
