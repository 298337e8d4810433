"""Thresholds of a ``SurpriseMonitor``: how large an error may be before it is called an alarm.

Errors of normal data are heavy-tailed, and those of one episode resemble each other. So nothing is assumed of their
distribution, and episodes are never divided: all of them set the threshold, and false alarms are counted fold by fold,
on a fifth of the episodes with a threshold of the other four.

    per step       threshold = the ⌈(N + 1)(1 − α)⌉-th smallest of the N errors of all episodes
    per episode    threshold = the ⌈(n + 1)(1 − α)⌉-th smallest of the n largest errors, one of each episode

The second is split conformal prediction: an episode of the same kind alarms at all with at most the probability α. The
first gives α on average over the episodes that one happens to have; how near to it one is, the interval tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from lewm.errors import ConfigError, DataError, FileError
from lewm.evaluate.floor import cache_folder
from lewm.evaluate.stats import Rate
from lewm.files import Kind, check_output, read_json, write_json
from lewm.rng import stream
from lewm.types import Array

Per = Literal["step", "episode"]
VERSION = 1
FOLDS = 5  # parts of the episodes, on each of which false alarms are counted with a threshold of the others
LEAST_EPISODES = 10
_SPLIT = 34  # what the random stream is for
CALIBRATION = Kind("a monitor's calibration", (".json",), lambda head: b'"false_alarms"' in head)


@dataclass(frozen=True)
class AlarmRate:
    """How often there was a false alarm on episodes that its threshold had not seen. interval: 95 %.

    count: steps or episodes.  effective: as how many independent ones they count, since alarms come in groups.
    """

    alarms: int
    count: int
    effective: int

    @property
    def value(self) -> float:
        return self.alarms / self.count if self.count else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's, for as many independent observations as these are worth."""
        return Rate(round(self.value * self.effective), self.effective).interval

    def __str__(self) -> str:
        low, high = (100 * bound for bound in self.interval)
        return f"{100 * self.value:.2f} % [{low:.2f}, {high:.2f}] ({self.alarms}/{self.count})"


@dataclass(frozen=True)
class Calibration:
    """A threshold, and what it is worth. It holds for one model, and for data like that which it was made of.

    model: digest of all that the model is.  every: environment steps between two frames that are looked at.
    false_alarms, per: what was asked for.  episodes: that were long enough to be scored.
    steps: the median of scored steps of an episode, on which the rate by episode depends.
    by_step, by_episode: the rates that were counted.
    """

    model: str
    every: int
    false_alarms: float
    per: Per
    threshold: float
    episodes: int
    steps: int
    by_step: AlarmRate
    by_episode: AlarmRate

    def __str__(self) -> str:
        asked = f"{100 * self.false_alarms:g} % of {self.per}s"
        counted = f"counted on {self.episodes} episodes of {self.steps} scored steps, each unseen by its threshold"
        rates = f"{self.by_step} of steps, {self.by_episode} of episodes"
        return f"Threshold {self.threshold:.4g} for {asked}; {counted}: {rates}."

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        check_output(Path(path), CALIBRATION)
        write_json(Path(path), {"version": VERSION} | asdict(self))

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read what ``save`` wrote."""
        document = read_json(Path(path))
        try:
            if document.pop("version") != VERSION:
                raise FileError(f"{path} has another version than {VERSION}. Calibrate again.")
            document |= {name: AlarmRate(**document[name]) for name in ("by_step", "by_episode")}
            read = Calibration(**document)
            if not 0 < read.threshold < math.inf:
                raise ValueError(f"the threshold is {read.threshold}")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FileError(f"{path} is no calibration of a monitor ({error!r}). Calibrate again.") from error
        return read

    def check(self, model: str, every: int) -> None:
        """Refuse a monitor that it was not made for."""
        if self.model != model:
            other = f"digest {self.model[:12]}, not {model[:12]}"
            raise ConfigError(f"This calibration is of another model ({other}). Calibrate this one.")
        if self.every != every:
            raise ConfigError(f"This calibration is for every={self.every}, the monitor has every={every}. Take that.")


def calibrated(
    scores: Sequence[Array], model: str, every: int, false_alarms: float = 0.01, per: Per = "step", seed: int = 0
) -> Calibration:
    """A threshold for a rate of false alarms, from the errors (steps,) of normal episodes."""
    check_asked(false_alarms, per)
    scored = [np.asarray(each, np.float64) for each in scores if len(each)]
    if not all(np.isfinite(each).all() for each in scored):
        raise DataError("The model's errors on this data are not all finite. Check the model and the frames.")
    if len(scored) < LEAST_EPISODES:
        problem = f"A calibration takes {LEAST_EPISODES} episodes or more that are long enough to be scored"
        raise DataError(f"{problem}, got {len(scored)} of {len(scores)}. Give more normal data.")
    shuffled = stream(seed, _SPLIT).permutation(len(scored)).tolist()
    alarms = np.zeros(len(scored), np.int64)
    for fold in range(FOLDS):
        apart = set(shuffled[fold::FOLDS])
        threshold = threshold_for(
            [each for number, each in enumerate(scored) if number not in apart], false_alarms, per
        )
        for number in apart:
            alarms[number] = (scored[number] > threshold).sum()
    threshold = threshold_for(scored, false_alarms, per)
    lengths = np.array([len(each) for each in scored])
    sizes = len(scored), int(np.median(lengths))
    return Calibration(model, every, false_alarms, per, threshold, *sizes, *alarm_rates(alarms, lengths))


def check_asked(false_alarms: float, per: str) -> None:
    """Refuse what is no rate."""
    if not 0 < false_alarms < 1:
        raise ConfigError(f"false_alarms is a share between 0 and 1, as 0.01, got {false_alarms}.")
    if per not in ("step", "episode"):
        raise ConfigError(f'per is "step" or "episode", got {per!r}.')


def threshold_for(scores: Sequence[Array], false_alarms: float, per: Per) -> float:
    """The finite-sample quantile of errors, (steps,) of each episode, as the formulas above have it."""
    values = np.sort(np.concatenate(scores) if per == "step" else [each.max() for each in scores])
    rank = math.ceil((len(values) + 1) * (1 - false_alarms) - 1e-9)
    if rank > len(values):
        needed = math.ceil((1 / false_alarms - 1) * FOLDS / (FOLDS - 1)) + 1
        problem = f"False alarms in {100 * false_alarms:g} % of {per}s take {needed} or more of them to calibrate on"
        raise DataError(f"{problem}; four fifths of yours are {len(values)}. Give more data, or allow more alarms.")
    return float(values[rank - 1])


def alarm_rates(alarms: Array, steps: Array) -> tuple[AlarmRate, AlarmRate]:
    """By step and by episode, of the alarms in each of E episodes, and their scored steps, int (E,) both."""
    by_step = AlarmRate(int(alarms.sum()), int(steps.sum()), _effective(alarms, steps))
    return by_step, AlarmRate(int((alarms > 0).sum()), len(steps), len(steps))


def count_alarms(scores: Sequence[Array], threshold: float) -> tuple[AlarmRate, AlarmRate]:
    """The same of errors (steps,) of each episode."""
    counted = [((each > threshold).sum(), len(each)) for each in scores if len(each)]
    alarms, steps = np.array(counted, np.int64).reshape(-1, 2).T
    return alarm_rates(alarms, steps)


def _effective(alarms: Array, steps: Array) -> int:
    """As how many independent steps those of E episodes count, whose alarms come together: from E to all of them."""
    episodes, total = len(steps), int(steps.sum())
    rate = alarms.sum() / total
    if episodes < 2 or rate == 0:  # nothing says how they come
        return min(episodes, total)
    variance = np.square(alarms - rate * steps).sum() / total**2 * episodes / (episodes - 1)
    return int(np.clip(rate * (1 - rate) / variance, min(episodes, total), total)) if variance > 0 else total


# -- what is remembered ------------------------------------------------------------------------------------------------


def remembered_at(model: str, every: int) -> Path:
    """Where the last calibration of a model is kept on this machine."""
    return cache_folder() / f"monitor_{model[:16]}_{every}.json"


def remember(calibration: Calibration) -> None:
    """Keep it for monitors with threshold="auto"."""
    calibration.save(remembered_at(calibration.model, calibration.every))


def recall(model: str, every: int) -> Calibration | None:
    """What was remembered for a model, if it can still be read."""
    path = remembered_at(model, every)
    if not path.is_file():
        return None
    found = Calibration.load(path)
    found.check(model, every)
    return found
