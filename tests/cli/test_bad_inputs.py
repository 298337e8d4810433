"""Everything that a user may type or a file may say: each setting and each value, as each wrong kind.

A bad input is one clear line and a status that is not 0; nothing is written, and nobody waits. Settings and values are
found by looking, so that new ones are covered from their first day. A sample is tried with each change, all of them in
the slow tests.
"""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
import time
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from lewm.checked import _alternatives, _hints, to_dict
from lewm.cli.collect import CollectArgs
from lewm.cli.data import DataConvertArgs, DataShowArgs
from lewm.cli.eval import EvalArgs
from lewm.cli.train import TrainArgs
from lewm.cli.understand.common import SubjectArgs
from lewm.config import Config
from lewm.errors import LewmError
from lewm.evaluate.manifest import load_manifest
from lewm.files import read_json, write_json
from lewm.methods.registry import method_names
from lewm.presets import preset, read_config
from lewm.retired import put

Lewm = Callable[..., Any]  # the fixture: arguments -> what came of it
NAN, INFINITY, HUGE, HALF = float("nan"), float("inf"), 10**30, "\ud800"  # the last is half a character
# What no setting of a kind can be. Kinds come from the annotations, choices are "choice".
WRONG: dict[Any, list[Any]] = {
    int: ["7", 1.5, True, [], {}, NAN, INFINITY, HUGE, -HUGE, -1],
    float: ["0.5", True, [], {}, NAN, INFINITY, -INFINITY, HUGE, 1e300, -1e300],
    bool: ["yes", 1, 0.0, []],
    str: [5, True, [], {}, HALF],
    "choice": [5, True, [], {}, "nonsense", HALF],
    Path: [5, True, []],
    tuple: [5, True, {}],
}
SAMPLE = 60


@dataclass(frozen=True)
class Bad:
    """A value in a place where it cannot be. where: a method, a verb or a file.  name: of the setting, dotted."""

    where: str
    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.where} {self.name}={self.value!r:.20}"


def kinds_of(hint: Any) -> set[Any]:
    """What a setting may be: the keys of ``WRONG``, and None."""
    made: dict[Any, Any] = {Literal: "choice", tuple: tuple}
    return {made.get(typing.get_origin(part), part) for part in _alternatives(hint)}


def wrong_values(hint: Any) -> Iterator[Any]:
    """What no setting with this annotation can be."""
    kinds = kinds_of(hint)
    (kind,) = kinds - {type(None)}
    yield from WRONG[kind]
    if type(None) not in kinds:
        yield None


def settings_of(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting below a section by its dotted name, and its annotation."""
    hints = _hints(type(section))
    for item in dataclasses.fields(section):
        value = getattr(section, item.name)
        if dataclasses.is_dataclass(value):
            yield from settings_of(value, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hints[item.name]


def sample(table: list[Bad]) -> list[Bad]:
    """The same few of a table each time."""
    return random.Random(0).sample(table, min(SAMPLE, len(table)))


# -- what a configuration may say --------------------------------------------------------------------------------


def bad_settings(method: str) -> list[Bad]:
    names = settings_of(preset("debug", method))
    return [Bad(method, name, value) for name, hint in names for value in wrong_values(hint)]


def assert_no_setting(bad: Bad, document: dict[str, Any]) -> None:
    copied = json.loads(json.dumps(document))
    put(copied, bad.name, bad.value)
    try:
        read_config(copied)
    except LewmError as refusal:
        text = str(refusal)
        assert "\n" not in text, bad
        assert bad.name.rpartition(".")[2] in text, (bad, text)
        assert len(text) < 700, bad
        text.encode()  # a terminal can show it
    else:
        raise AssertionError(f"{bad} is accepted")


def test_some_settings_of_wrong_kinds_are_refused():
    documents = {method: to_dict(preset("debug", method)) for method in ("lewm", "gciql")}
    for bad in sample([bad for method in documents for bad in bad_settings(method)]):
        assert_no_setting(bad, documents[bad.where])


@pytest.mark.slow
@pytest.mark.parametrize("method", method_names())
def test_all_settings_of_wrong_kinds_are_refused(method: str):
    table, document = bad_settings(method), to_dict(preset("debug", method))
    assert len(table) > 500
    for bad in table:
        assert_no_setting(bad, document)


# -- what a command may be given ---------------------------------------------------------------------------------

# By kind; any text may be a name or a place.
TYPED: dict[Any, list[str]] = {
    int: ["seven", "1.5", "nan", "1e3", "", str(HUGE), str(-HUGE), "-1"],
    float: ["half", "nan", "inf", "-inf", "1e300", ""],
    "choice": ["nonsense", ""],
    tuple: ["nonsense"],
}


def bad_flags(verb: str, settings: Any) -> list[Bad]:
    """settings: an instance or a class of what the verb takes."""
    names = _hints(settings).items() if isinstance(settings, type) else settings_of(settings)
    found = []
    for name, hint in names:
        typed = kinds_of(hint) - {type(None)}
        found += [Bad(verb, name, text) for kind in typed for text in TYPED.get(kind, []) if len(typed) == 1]
    return found


def all_bad_flags() -> list[Bad]:
    config = preset("debug")
    return [
        *bad_flags("train", TrainArgs.like(config, Path("run"))),
        *bad_flags("eval", EvalArgs(plan=config.plan, eval=config.eval)),
        *bad_flags("collect", CollectArgs),
        *bad_flags("convert", DataConvertArgs),
        *bad_flags("show", DataShowArgs),
        *bad_flags("understand", SubjectArgs),
    ]


@pytest.fixture(scope="module")
def model(debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(debug_run, tmp_path_factory.mktemp("model") / "run"))


def assert_flag_refused(lewm: Lewm, bad: Bad, model: Path, data: Path, folder: Path) -> None:
    flag = f"--{bad.name.replace('_', '-')}={bad.value}"
    verbs: dict[str, tuple[object, ...]] = {
        "train": ("train", "debug", f"--data={data}", f"--out={folder / 'run'}", "--device=cpu"),
        "eval": ("eval", model, f"--out={folder / 'r.json'}", "--device=cpu"),
        "collect": ("collect", "tworoom", f"--out={folder / 'd.h5'}", "--episodes=1", "--resolution=28"),
        "convert": ("data", "convert", data, folder / "new", "--to=folder"),
        "show": ("data", "show", data, f"--out={folder / 'film.gif'}"),
        "understand": ("understand", "probe", model, f"--out={folder / 'out'}", "--device=cpu"),
    }
    started = time.monotonic()
    answer = lewm(*verbs[bad.where], flag)
    assert time.monotonic() - started < 10, bad
    assert answer.status in (1, 2), (bad, answer)
    assert "Traceback" not in answer.err, bad
    if answer.status == 1:
        answer.assert_refused()
        assert answer.err.count("Error:") == 1, (bad, answer.err)
    assert list(folder.iterdir()) == [], bad


def test_some_flags_of_wrong_kinds_are_refused(lewm: Lewm, model: Path, debug_config: Config, tmp_path: Path):
    assert debug_config.data is not None
    for bad in sample(all_bad_flags())[:20]:
        assert_flag_refused(lewm, bad, model, debug_config.data, tmp_path)


@pytest.mark.slow
def test_all_flags_of_wrong_kinds_are_refused(lewm: Lewm, model: Path, debug_config: Config, tmp_path: Path):
    assert debug_config.data is not None
    table = all_bad_flags()
    assert len(table) > 200
    for bad in table:
        assert_flag_refused(lewm, bad, model, debug_config.data, tmp_path)


# -- what files may say ------------------------------------------------------------------------------------------

ANYTHING = ["text", 5, -1, 1.5, True, None, [], {}, [None], {"a": 1}, HUGE, NAN, HALF, [[1]]]


def values_below(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Every value in a document, and where it is; of a list the first."""
    yield place, value
    entries = (
        value.items() if isinstance(value, dict) else list(enumerate(value))[:1] if isinstance(value, list) else ()
    )
    for key, each in entries:
        yield from values_below(each, (*place, key))


def replaced(document: Any, place: tuple[Any, ...], value: Any) -> Any:
    if not place:
        return value
    copied = json.loads(json.dumps(document))
    section = copied
    for key in place[:-1]:
        section = section[key]
    section[place[-1]] = value
    return copied


@dataclass(frozen=True)
class Document:
    """A file of JSON, and how it is read.

    told: beginnings of the names of values that nobody reads, or that anybody may choose.
    """

    content: Any
    path: Path
    command: tuple[object, ...]
    told: tuple[str, ...]


@pytest.fixture(scope="module")
def documents(debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Document]:
    from lewm import checkpoint
    from lewm.evaluate.question import ask
    from lewm.evaluate.results import model_files
    from lewm.evaluate.runner import evaluate
    from lewm.methods.files import load

    folder = tmp_path_factory.mktemp("documents")
    source = checkpoint.resolve(str(debug_run))
    loaded, run = load(source, "cpu"), read_config(read_json(debug_run / "config.json"))
    evaluate(loaded, run).save(folder / "results.json", model_files(source), ask(loaded, run), "lewm eval run")
    pairs = [dataclasses.asdict(pair) for pair in load_manifest("tworoom").first(2)]
    write_json(folder / "manifest.json", {"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": pairs})
    shutil.copytree(debug_run, folder / "run")
    small = ("--device=cpu", "--eval.episodes=2", "--eval.budget=10", f"--out={folder / 'new.json'}")
    results, manifest, config = (folder / name for name in ("results.json", "manifest.json", "run/config.json"))
    whole = {path: read_json(path) for path in (results, manifest, config)}
    for figures in whole[results]["rates"].values():  # what follows from the rest is not read
        for name in figures.keys() - {"successes", "episodes"}:
            del figures[name]
    answered = ("eval", source, *small[:1], f"--out={results}")
    of_results = ("question", "command", "versions", "device", "checkpoint", "goal_offset", "flops_per_plan", "config")
    compared = (*of_results, "rates", "times", "episodes.0.")
    answered_by = (*of_results, "environment", "times", "episodes")
    free = ("collect.", "plan.", "eval.", "out", "data", "device", "loader.", "train.")
    asked = ("eval", source, f"--manifest={manifest}", *small)
    continued = ("train", "debug", f"--data={run.data}", f"--out={config.parent}", "--device=cpu")
    return {
        "compare": Document(whole[results], results, ("compare", results), compared),
        "answered": Document(whole[results], results, answered, answered_by),
        "manifest": Document(whole[manifest], manifest, asked, ("pairs.0.",)),
        "run": Document(whole[config], config, continued, free),
    }


def check_file(lewm: Lewm, document: Document, table: list[tuple[tuple[Any, ...], Any]]) -> None:
    """Each is refused in one line, or accepted where it says nothing wrong; and the file stays as it is."""
    for place, value in table:
        name = ".".join(map(str, place))
        document.path.write_text(text := json.dumps(replaced(document.content, place, value)))
        started = time.monotonic()
        answer = lewm(*document.command)
        assert time.monotonic() - started < 10, (name, value)
        if answer.status == 0:
            assert name.startswith(document.told), (name, value)
            Path(document.path.parent / "new.json").unlink(missing_ok=True)
        else:
            answer.assert_refused()
            assert answer.err.count("Error:") == 1, (name, value)
            assert document.path.read_text() == text
    document.path.write_text(json.dumps(document.content))


def bad_values(content: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Values of another kind than those that are there."""
    return [
        (place, value)
        for place, there in values_below(content)
        for value in ANYTHING
        if type(value) is not type(there) and not (isinstance(value, int) and isinstance(there, float))
    ]


@pytest.mark.parametrize("name", ["compare", "answered", "manifest", "run"])
def test_some_files_with_wrong_values_are_refused(lewm: Lewm, documents: dict[str, Document], name: str):
    table = bad_values(documents[name].content)
    check_file(lewm, documents[name], random.Random(1).sample(table, 10))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compare", "answered", "manifest", "run"])
def test_all_files_with_wrong_values_are_refused(lewm: Lewm, documents: dict[str, Document], name: str):
    table = bad_values(documents[name].content)
    assert len(table) > 80
    check_file(lewm, documents[name], table)
