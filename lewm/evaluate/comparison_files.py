"""The files of a comparison: results, found, read and given names; and what it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from lewm.checked import of_kind
from lewm.errors import ConfigError, DataError
from lewm.evaluate.results import not_results
from lewm.files import HEAD_BYTES, RESULTS, Kind, read_json

Pair: TypeAlias = "tuple[int, tuple[float, ...], tuple[float, ...]]"
Outcomes: TypeAlias = "dict[str, list[bool | None]]"  # by protocol
# The name of each protocol, and where an episode of a results file has its outcome.
PROTOCOLS = {"paper": "success", "strict": "strict_success"}
MARK = "<!-- written by `lewm compare`"  # how its pages begin: no other is ever replaced
MARKDOWN = Kind("a page of `lewm compare`", (".md",), lambda head: head.startswith(MARK.encode()))
COMPARISON = Kind("a comparison", (".json",), lambda head: b'"contests"' in head)
_PICTURES = b"\x89PNG", b"%PDF"
FIGURE = Kind("a figure", (".png", ".svg", ".pdf"), lambda head: head.startswith(_PICTURES) or b"<svg" in head)
USAGE = "usage: lewm compare [NAME=]FILE [...]; FILE is what `lewm eval` wrote, or a folder with such files"


@dataclass(frozen=True)
class Entry:
    """One evaluation. name: what it is called beside the others.

    pairs: (index, start, goal).  outcomes, random, recorded: of the method and of the two bounds, pair by pair; None
    in them does not count, None for a bound: the file does not have it.  nearest: the lowest cost of each episode's
    plans.  planner, seconds_per_plan, flops_per_plan, flops_per_episode: None of a method that acts; arithmetic also
    where it was not counted.
    """

    name: str
    path: Path
    environment: str
    method: str
    budget: int
    manifest: str | None
    pairs: tuple[Pair, ...]
    outcomes: Outcomes
    random: Outcomes | None
    recorded: Outcomes | None
    nearest: tuple[float | None, ...]
    device: str
    planner: str | None
    seconds_per_plan: float | None
    flops_per_plan: float | None
    flops_per_episode: float | None
    command: str | None
    digest: str | None

    @property
    def question(self) -> tuple[str, tuple[Pair, ...], int]:
        """What two evaluations have in common that can be tested against each other."""
        return self.environment, self.pairs, self.budget


def read_entries(sources: Sequence[str]) -> list[Entry]:
    """The evaluations in files and folders, each possibly as NAME=PLACE, which gives the name; all of them once.

    What a folder holds and was named before stays where it was named: so one of them can be made the first.
    """
    if not sources:
        raise ConfigError(f"There is nothing to compare. {USAGE}.")
    places: dict[Path, tuple[str, Path]] = {}
    for source in sources:
        found, in_folder = _found(source)
        for name, path in found:
            if path.resolve() in places and not in_folder:
                raise ConfigError(f"{path} is given twice. Leave one of them out.")
            places.setdefault(path.resolve(), (name, path))
    entries = [read_entry(path, name) for name, path in places.values()]
    answers: dict[str, Path] = {}
    for entry in entries:
        if entry.digest and entry.digest in answers:
            raise ConfigError(f"{entry.path} has the same results as {answers[entry.digest]}. Leave one of them out.")
        answers[entry.digest or ""] = entry.path
    return _with_names(entries)


def read_entry(path: Path, name: str = "") -> Entry:
    """One results file."""
    document = read_json(path)
    try:
        return _entry(document, path, name)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise not_results(path, error) from error


def _found(source: str) -> tuple[list[tuple[str, Path]], bool]:
    """Names, "" for none, and files that one argument stands for; and whether that is a folder."""
    name, equals, rest = source.partition("=")
    if not equals or Path(source).exists():
        name, rest = "", source
    place = Path(rest)
    if not place.is_dir():
        return [(name, place)], False
    files = [path for path in sorted(place.rglob("*.json")) if _holds_results(path)]
    if not files:
        raise DataError(f"The folder {place} holds no results of `lewm eval`. {USAGE}.")
    return [(name, path) for path in files], True


def _holds_results(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return RESULTS.fits(file.read(HEAD_BYTES))


def _entry(document: Any, path: Path, name: str) -> Entry:
    episodes, config, times = document["episodes"], document["config"], document["times"]
    if not episodes:
        raise ValueError("episodes")
    plans = of_kind(int, times["plans"], "times.plans")
    flops = of_kind(float | None, document.get("flops_per_plan"), "flops_per_plan")
    seconds = of_kind(float, times["seconds_per_plan_p50"], "times.seconds_per_plan_p50")
    solver, schedule = (of_kind(str, config["plan"][name], f"config.plan.{name}") for name in ("solver", "schedule"))
    recorded = _outcomes(episodes, "recorded_")
    return Entry(
        name=name,
        path=path,
        environment=of_kind(str, document["environment"], "environment"),
        method=of_kind(str, config.get("method", {}).get("name", "lewm"), "config.method.name"),  # once the only one
        budget=of_kind(int, config["eval"]["budget"], "config.eval.budget"),
        manifest=of_kind(str | None, config["eval"].get("manifest"), "config.eval.manifest"),
        pairs=tuple(map(_pair, episodes)),
        outcomes={protocol: [_outcome(each[key]) for each in episodes] for protocol, key in PROTOCOLS.items()},
        random=_outcomes(episodes, "random_policy_"),
        recorded=recorded,
        nearest=tuple(_lowest(each["plan_costs"]) for each in episodes),
        device=of_kind(str, document["device"], "device"),
        planner=f"{solver}, {schedule}" if plans else None,
        seconds_per_plan=seconds if plans else None,
        flops_per_plan=flops,
        flops_per_episode=flops and flops * plans / len(episodes),
        command=of_kind(str | None, document.get("command"), "command"),
        digest=of_kind(str | None, document.get("question"), "question"),
    )


def _pair(episode: dict[str, Any]) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """Number, start and goal of an episode."""
    start, goal = (
        tuple(of_kind(float, number, f"episodes.{name}") for number in episode[name]) for name in ("start", "goal")
    )
    if not start or len(start) != len(goal):
        raise ValueError("episodes.start and .goal must be states")
    return of_kind(int, episode["index"], "episodes.index"), start, goal


def _outcomes(episodes: Sequence[dict[str, Any]], prefix: str) -> Outcomes | None:
    """What somebody else did with the same pairs, if the file says it."""
    if not all(prefix + key in each for each in episodes for key in PROTOCOLS.values()):
        return None
    return {protocol: [_outcome(each[prefix + key]) for each in episodes] for protocol, key in PROTOCOLS.items()}


def _outcome(value: Any) -> bool | None:
    outcome: bool | None = of_kind(bool | None, value, "an outcome")
    return outcome


def _lowest(costs: Sequence[float | None]) -> float | None:
    known = [of_kind(float, cost, "episodes.plan_costs") for cost in costs if cost is not None]
    return min(known, default=None)


def _with_names(entries: list[Entry]) -> list[Entry]:
    """Names for those that have none: the methods', if these tell the evaluations of a world apart, else the files'.

    A name that is used twice in a world is told apart by the files as well.
    """
    methods = {(entry.environment, entry.method): 0 for entry in entries}
    for entry in entries:
        methods[entry.environment, entry.method] += 1
    by_method = max(methods.values()) == 1
    given = [replace(entry, name=entry.name or (entry.method if by_method else "")) for entry in entries]
    return [replace(entry, name=_called(entry, given)) for entry in given]


def _called(entry: Entry, entries: Sequence[Entry]) -> str:
    rivals = [each for each in entries if each.environment == entry.environment and each.name == entry.name]
    if entry.name and len(rivals) == 1:
        return entry.name
    place = _apart(entry.path, [each.path for each in entries if each.environment == entry.environment])
    known = entry.name or ("" if entry.method in place else entry.method)
    return f"{known} ({place})" if known else place


def _apart(path: Path, paths: Sequence[Path]) -> str:
    """The part of a path in which it differs from the others."""
    mine, parts = path.with_suffix("").parts, [each.with_suffix("").parts for each in paths]
    shortest = min(map(len, parts))
    head = 0
    while head < shortest - 1 and len({each[head] for each in parts}) == 1:
        head += 1
    tail = 0
    while tail < shortest - 1 - head and len({each[-1 - tail] for each in parts}) == 1:
        tail += 1
    return "/".join(mine[head : len(mine) - tail])
