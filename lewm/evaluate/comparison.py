"""Several evaluations side by side: who reaches more, by how much, at what price, and with which kind of pairs.

Evaluations of the same pairs with the same budget form a contest. Tests are made within a contest only, and each is of
an evaluation against the contest's first: episode by episode (McNemar, exact), with Holm's correction for all tests of
the comparison by one protocol.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from lewm.envs.registry import env_entry, pair_kinds
from lewm.errors import ConfigError, DataError, EnvError, unknown_name
from lewm.evaluate.comparison_files import PROTOCOLS, Entry
from lewm.evaluate.manifest import PACKAGED, load_manifest
from lewm.evaluate.stats import Comparison, Rate, holm
from lewm.files import json_digest
from lewm.types import Array

ALIKE = 1.1  # planning arithmetic counts as equal if it is within this factor
FLOOR, CEILING = "random actions", "recorded actions"


@dataclass(frozen=True)
class Tested:
    """An evaluation against its contest's first. adjusted: the p-value after Holm's correction."""

    entry: Entry
    protocol: str
    found: Comparison
    adjusted: float


@dataclass(frozen=True)
class Contest:
    """Evaluations of the same pairs with the same budget, the first of which the others are tested against."""

    entries: tuple[Entry, ...]

    @property
    def first(self) -> Entry:
        return self.entries[0]

    @property
    def world(self) -> str:
        """The short name of the environment, if it is known here."""
        try:
            return env_entry(self.first.environment).name
        except EnvError:
            return self.first.environment

    @property
    def title(self) -> str:
        """The world, and what was asked there."""
        manifest = self.first.manifest
        which = "" if manifest in (None, "paper") else f"{Path(str(manifest)).stem} "
        return f"{self.world}: {len(self.first.pairs)} {which}pairs, {self.first.budget} actions"

    def bounds(self) -> dict[str, dict[str, list[bool | None]]]:
        """Outcomes by protocol of what no method made: the floor and the ceiling, as far as any file knows them."""
        floors, ceilings = ([getattr(entry, name) for entry in self.entries] for name in ("random", "recorded"))
        known = {FLOOR: next(filter(None, floors), None), CEILING: next(filter(None, ceilings), None)}
        return {name: outcomes for name, outcomes in known.items() if outcomes}

    def equal_arithmetic(self) -> list[list[Entry]]:
        """Those that plan with about as much arithmetic in an episode, where at least two do."""
        counted = sorted((e for e in self.entries if e.flops_per_episode), key=lambda e: e.flops_per_episode or 0)
        groups: list[list[Entry]] = []
        for entry in counted:
            assert entry.flops_per_episode
            lowest = groups[-1][0].flops_per_episode if groups else None
            if lowest and entry.flops_per_episode <= ALIKE * lowest:
                groups[-1].append(entry)
            else:
                groups.append([entry])
        return [group for group in groups if len(group) > 1]


@dataclass(frozen=True)
class Kinds:
    """The pairs of a contest by what tells them apart. places: of the pairs of each kind, in the contest's order."""

    contest: Contest
    key: str
    places: dict[str, list[int]]


@dataclass(frozen=True)
class Compared:
    """All that a comparison found. notes: sentences on what was not compared, and why."""

    contests: tuple[Contest, ...]
    tests: tuple[Tested, ...]
    kinds: tuple[Kinds, ...]
    notes: tuple[str, ...]

    def tests_of(self, contest: Contest) -> list[Tested]:
        return [test for test in self.tests if any(test.entry is entry for entry in contest.entries)]


def compare(entries: Sequence[Entry], by: Iterable[str] = ()) -> Compared:
    """Compare evaluations. by: what to tell pairs apart by; each has to be known of at least one of the worlds."""
    contests = tuple(Contest(tuple(group)) for group in _grouped(entries))
    kinds = tuple(found for key in by for found in _kinds(contests, key))
    return Compared(contests, tuple(_tests(contests)), kinds, tuple(_notes(contests)))


def paired(first: Entry, second: Entry, protocol: str) -> Comparison:
    """Two evaluations, episode by episode. Only answers to the same question can be paired."""
    if first.environment != second.environment:
        worlds = f"{first.path} is about {first.environment}, {second.path} about {second.environment}"
        raise DataError(f"{worlds}: nothing to pair. Compare evaluations of one world.")
    if first.pairs != second.pairs:
        found = f"{len(first.pairs)} and {len(second.pairs)}, not the same"
        remedy = "Evaluate both with the same --manifest and --eval.episodes"
        raise DataError(f"The pairs of start and goal in {first.path} and {second.path} differ ({found}). {remedy}.")
    if first.budget != second.budget:
        found = f"{first.path} allows {first.budget} actions, {second.path} {second.budget}"
        raise DataError(f"{found}: more actions reach more goals. Evaluate both with the same --eval.budget.")
    # Whether an episode counts depends on its pair, and where contacts are close calls on the machine as well.
    both = zip(first.outcomes[protocol], second.outcomes[protocol], strict=True)
    counted = [(one, other) for one, other in both if one is not None and other is not None]
    return Comparison.of([one for one, _ in counted], [other for _, other in counted])


def rates(outcomes: dict[str, list[bool | None]], places: Iterable[int] | None = None) -> dict[str, Rate]:
    """Success by protocol, of all pairs or of some."""
    chosen = None if places is None else list(places)
    return {
        protocol: Rate.of(found if chosen is None else [found[place] for place in chosen])
        for protocol, found in outcomes.items()
    }


def nearest_imagined(entry: Entry, places: Iterable[int]) -> float | None:
    """The median of the lowest costs of these episodes' plans: where it is high, the search has found no way."""
    known = [cost for place in places if (cost := entry.nearest[place]) is not None]
    return statistics.median(known) if known else None


def time_ratio(entry: Entry, first: Entry) -> float | None:
    """How many times as long as the first it plans; None where one does not plan, or on another device."""
    if entry.seconds_per_plan is None or not first.seconds_per_plan or entry.device != first.device:
        return None
    return entry.seconds_per_plan / first.seconds_per_plan


def _grouped(entries: Sequence[Entry]) -> list[list[Entry]]:
    """By world, in the order in which worlds and questions appear."""
    groups: list[list[Entry]] = []
    for entry in entries:
        group = next((each for each in groups if each[0].question == entry.question), None)
        if group is None:
            groups.append([entry])
        else:
            group.append(entry)
    worlds = list(dict.fromkeys(group[0].environment for group in groups))
    return sorted(groups, key=lambda group: worlds.index(group[0].environment))


def _tests(contests: Sequence[Contest]) -> Iterator[Tested]:
    for protocol in PROTOCOLS:
        found = [(e, paired(c.first, e, protocol)) for c in contests for e in c.entries[1:]]
        found = [(entry, comparison) for entry, comparison in found if comparison.first.total]  # else: nothing counts
        adjusted = holm([comparison.p_value for _, comparison in found])
        for (entry, comparison), p_value in zip(found, adjusted, strict=True):
            yield Tested(entry, protocol, comparison, p_value)


def _notes(contests: Sequence[Contest]) -> Iterator[str]:
    """What is not tested against what, and why."""
    for _, group in groupby(contests, key=lambda contest: contest.first.environment):
        first, *others = group
        for other in others:
            try:
                paired(first.first, other.first, next(iter(PROTOCOLS)))
            except DataError as error:
                yield f"No test of {other.first.name} against {first.first.name}. {error}"
    worlds = {contest.first.environment for contest in contests}
    if len(worlds) > 1 and all(len(contest.entries) == 1 for contest in contests):
        yield "Evaluations of different worlds are shown side by side, and not tested against each other."


def _kinds(contests: Sequence[Contest], key: str) -> Iterator[Kinds]:
    tables = [pair_kinds(contest.first.environment) for contest in contests]
    if not any(key in table for table in tables):
        known = sorted({name for table in tables for name in table})
        where = ", ".join(dict.fromkeys(contest.world for contest in contests))
        if not known:
            raise ConfigError(f"{where}: nothing is known there that tells pairs apart. Leave out --by.")
        raise ConfigError(f"{unknown_name('kind of pairs', key, known)} These are of {where}.")
    for contest, table in zip(contests, tables, strict=True):
        if key in table:
            pairs, actions = contest.first.pairs, _recorded_actions(contest.first)
            places: dict[str, list[int]] = {}
            for place, (_, start, goal) in enumerate(pairs):
                kind = table[key](np.array(start), np.array(goal), None if actions is None else actions[place])
                places.setdefault(kind or "unknown", []).append(place)
            yield Kinds(contest, key, dict(sorted(places.items())))


def _recorded_actions(entry: Entry) -> Array | None:
    """The actions that were recorded between start and goal of an evaluation's pairs, if their manifest is at hand."""
    for source in (*PACKAGED, *([entry.manifest] if entry.manifest else [])):
        try:
            manifest = load_manifest(entry.environment, source)
        except ConfigError:
            continue
        if tuple((pair.index, pair.start, pair.goal) for pair in manifest.pairs[: len(entry.pairs)]) == entry.pairs:
            return manifest.actions
    return None


def to_dict(compared: Compared) -> dict[str, Any]:
    """As plain JSON values, outcomes included: who has them can count again."""
    return {
        "contests": [_contest(compared, contest) for contest in compared.contests],
        "correction": "Holm, over all tests by one protocol",
        "notes": list(compared.notes),
    }


def _contest(compared: Compared, contest: Contest) -> dict[str, Any]:
    first = contest.first
    return {
        "environment": first.environment,
        "pairs": len(first.pairs),
        "pairs_sha256": json_digest(first.pairs),
        "budget": first.budget,
        "entries": [_entry(entry, first) for entry in contest.entries],
        "bounds": {name: _success(outcomes) for name, outcomes in contest.bounds().items()},
        "tests": [
            {
                "name": test.entry.name,
                "against": first.name,
                "protocol": test.protocol,
                "only_against": test.found.only_first,
                "only_name": test.found.only_second,
                "p": test.found.p_value,
                "p_holm": test.adjusted,
            }
            for test in compared.tests_of(contest)
        ],
        "equal_arithmetic": [[entry.name for entry in group] for group in contest.equal_arithmetic()],
        "by": {kinds.key: _by_kind(kinds) for kinds in compared.kinds if kinds.contest is contest},
    }


def _entry(entry: Entry, first: Entry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "file": str(entry.path),
        "question": entry.digest,
        "method": entry.method,
        "command": entry.command,
        "device": entry.device,
        "planner": entry.planner,
        "seconds_per_plan": entry.seconds_per_plan,
        "times_as_long_as_first": time_ratio(entry, first),
        "flops_per_plan": entry.flops_per_plan,
        "flops_per_episode": entry.flops_per_episode,
        **_success(entry.outcomes),
    }


def _success(outcomes: dict[str, list[bool | None]]) -> dict[str, Any]:
    """Rates, and each pair's outcome as a letter: 1, 0, or - where it does not count."""
    letters = {True: "1", False: "0", None: "-"}
    written = {protocol: "".join(letters[each] for each in found) for protocol, found in outcomes.items()}
    return {"success": {name: rate.to_dict() for name, rate in rates(outcomes).items()}, "outcomes": written}


def _by_kind(kinds: Kinds) -> dict[str, Any]:
    shown = {entry.name: entry.outcomes for entry in kinds.contest.entries} | kinds.contest.bounds()
    return {
        kind: {
            name: {protocol: rate.to_dict() for protocol, rate in rates(outcomes, places).items()}
            for name, outcomes in shown.items()
        }
        for kind, places in kinds.places.items()
    }
