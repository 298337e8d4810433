"""A monitor for robots: an alarm when what is seen is not what the model expected.

    monitor = lewm.SurpriseMonitor(model)
    print(monitor.calibrate("normal.h5", false_alarms=0.01, per="episode"))
    monitor.reset()
    monitor.step(env.render())                         # an episode's first frame has no action before it
    while True:
        env.step(action)
        if monitor.step(env.render(), action).alarm:   # the action that has led to this frame
            stop()

A model predicts one block of K environment steps ahead. The monitor looks at every frame, keeps its embedding, and
expects it from the frames K, 2K, ... steps before and the actions in between: contexts of all K phases, interleaved. So
a change shows at once, and each step costs one frame's embedding and one prediction. ``every=K`` looks at block
boundaries only, as the paper does, for a K-th of the work and up to K - 1 steps later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from lewm.data.store import EpisodeStore
from lewm.errors import ConfigError, DataError
from lewm.methods.base import Method
from lewm.methods.files import identity
from lewm.types import Array, ProgressCallback
from lewm.understand.foresight import Foresight, fastest_precision, first_expected, squared_distance
from lewm.understand.monitor_calibration import Calibration, Per, calibrated, check_asked, recall, remember

# Frames uint8 (L, S, S, 3) of every step, and the raw actions between them, (L - 1, action_dim).
Episode = tuple[Array, Array]


@dataclass(frozen=True)
class Surprise:
    """What the monitor says of one step.

    score: squared error of the frame's embedding; None while the episode is too young to expect anything, and for
    frames that are not looked at.  threshold: above which it is an alarm.  step: steps since the first frame.
    """

    score: float | None
    threshold: float
    step: int

    @property
    def alarm(self) -> bool:
        return self.score is not None and self.score > self.threshold


class SurpriseMonitor:
    """Compares every frame with what a world model expected.

    Args:
        model: of a method that predicts frames, as ``lewm.load`` gives it. Others are refused.
        threshold: of the squared error; a ``Calibration``, or the file of one; "auto": the last calibration of this
            model on this machine, or the one that ``calibrate`` is going to make.
        every: environment steps between two frames that are looked at; it divides the model's block.
        precision: in which frames are embedded. "bf16" is faster on processors that compute it, and "auto" takes it
            there, or what the given calibration was made in. Errors differ by a few percent, so that a calibration
            holds for its own precision.
    """

    def __init__(
        self,
        model: Method,
        threshold: float | str | Path | Calibration | Literal["auto"] = "auto",
        every: int = 1,
        precision: Literal["auto", "float32", "bf16"] = "auto",
    ) -> None:
        if precision not in ("auto", "float32", "bf16"):
            raise ConfigError(f'precision is "auto", "float32" or "bf16", got {precision!r}.')
        if isinstance(threshold, str | Path) and threshold != "auto":
            threshold = Calibration.load(threshold)
        made_in = threshold.precision if isinstance(threshold, Calibration) else fastest_precision(model.device)
        self.precision = made_in if precision == "auto" else precision
        self._foresight, self.every = Foresight(model, self.precision), every
        self._first = first_expected(model.history, model.frame_skip, every)
        self._digest = identity(model)
        self.calibration = self._found(threshold)
        self._threshold = self.calibration.threshold if self.calibration else None
        if isinstance(threshold, float | int):
            self._threshold = _checked_threshold(threshold)
        self._span = model.history * model.frame_skip
        self._embeddings: deque[torch.Tensor] = deque(maxlen=self._first)
        self._actions: deque[Array] = deque(maxlen=self._span)
        self._steps = -1
        apart = model.frame_skip // every
        self._places = [apart * number for number in range(model.history)]  # of a context, among kept embeddings

    def _found(self, threshold: object) -> Calibration | None:
        """The calibration that is meant, checked."""
        if isinstance(threshold, float | int):
            return None
        if threshold == "auto":
            return recall(self._digest, self.every, self.precision)
        if not isinstance(threshold, Calibration):
            raise ConfigError(f'threshold is a number, a calibration, its file or "auto", got {threshold!r}.')
        threshold.check(self._digest, self.every, self.precision)
        return threshold

    @property
    def threshold(self) -> float:
        """Above which an error is an alarm."""
        if self._threshold is None:
            remedy = "Call monitor.calibrate(DATASET) with normal episodes, or give a threshold"
            raise ConfigError(f'threshold="auto", and this model has no calibration on this machine. {remedy}.')
        return self._threshold

    def reset(self) -> None:
        """Begin an episode: forget what was seen."""
        self._embeddings.clear()
        self._actions.clear()
        self._steps = -1

    def step(self, frame: Array, action: Array | None = None) -> Surprise:
        """Look at the newest frame, uint8 (S, S, 3) of any size S, which ``action`` (action_dim,), raw, has led to.

        Call it once for every environment step, and first of all with the episode's first frame and no action.
        """
        threshold = self.threshold  # asked for before anything is remembered
        seen, done = _checked_frame(frame), self._checked_action(action)
        self._steps += 1
        if done is not None:
            self._actions.append(done)
        if self._steps % self.every:
            return Surprise(None, threshold, self._steps)
        z_ND = self._foresight.embed(seen[None])
        score = self._score(z_ND) if len(self._embeddings) == self._first else None
        self._embeddings.append(z_ND)
        return Surprise(score, threshold, self._steps)

    def _score(self, z_ND: torch.Tensor) -> float:
        """The error of an embedding (1, D) whose whole context is known."""
        f = self._foresight
        blocks = np.stack(self._actions).reshape(1, f.history, f.frame_skip, f.action_dim)
        context_MTD = torch.stack([self._embeddings[place] for place in self._places], dim=1)
        expected = f.expected(context_MTD, torch.from_numpy(blocks).to(f.device))
        return float(squared_distance(expected, z_ND)[0])

    def _checked_action(self, action: Array | None) -> Array | None:
        begun, size = self._steps >= 0, self._foresight.action_dim
        if (action is not None) != begun:
            said = (
                "needs the action that has led to it" if begun else "has no action before it: call reset() once, then"
            )
            raise DataError(f"Frame {self._steps + 1} of an episode {said}{'' if begun else ' step(frame)'}.")
        if action is None:
            return None
        checked = np.array(action, np.float32)
        if checked.shape != (size,) or not np.isfinite(checked).all():
            raise DataError(f"An action is {size} finite numbers, got {action!r}.")
        return checked

    # -- calibration ---------------------------------------------------------------------------------------------------

    def calibrate(
        self,
        data: str | Path | EpisodeStore | Iterable[Episode],
        false_alarms: float = 0.01,
        per: Per = "step",
        episodes: int | None = None,
        seed: int = 0,
        on_progress: ProgressCallback | None = None,
    ) -> Calibration:
        """Set the threshold by normal episodes that no training has seen; remember it for threshold="auto".

        data: a dataset, or episodes of frames and actions.  false_alarms: the share of steps, or of episodes, that may
        alarm.  episodes: take the first so many, None: all.  seed: of the split.  on_progress: counts episodes.
        """
        check_asked(false_alarms, per)
        scores = list(self.scores(data, episodes, on_progress))
        self.calibration = calibrated(scores, self._digest, self.every, false_alarms, per, seed, self.precision)
        self._threshold = self.calibration.threshold
        remember(self.calibration)
        return self.calibration

    def scores(
        self,
        data: str | Path | EpisodeStore | Iterable[Episode],
        episodes: int | None = None,
        on_progress: ProgressCallback | None = None,
    ) -> Iterator[Array]:
        """The scores of each episode, as ``step`` gives them, float64 (steps,); none of one that is too short."""
        if isinstance(data, str | Path | EpisodeStore):
            yield from self._scores_of_dataset(data, episodes, on_progress)
            return
        for number, (frames, actions) in enumerate(data):
            if number == episodes:
                break
            if len(frames) != len(actions) + 1 or np.shape(actions)[1:] != (self._foresight.action_dim,):
                problem = f"L frames and (L - 1, {self._foresight.action_dim}) actions"
                raise DataError(f"An episode is {problem}, got {np.shape(frames)} and {np.shape(actions)}.")
            yield self._scores_of(np.asarray(frames)[:: self.every], np.asarray(actions))
            if on_progress:
                on_progress(number + 1, episodes or number + 1)

    def _scores_of_dataset(
        self, data: str | Path | EpisodeStore, episodes: int | None, on_progress: ProgressCallback | None
    ) -> Iterator[Array]:
        with ExitStack() as stack:
            store = data if isinstance(data, EpisodeStore) else stack.enter_context(EpisodeStore(data))
            if store.action_dim != self._foresight.action_dim:
                sizes = f"{store.action_dim} numbers, but the model's have {self._foresight.action_dim}"
                raise DataError(f"{store.path} has actions of {sizes}. Take data of the model's world.")
            if self.every % store.frame_stride:
                remedy = f"Collect it with --frame-stride 1, or make the monitor with every={store.frame_stride}"
                raise DataError(
                    f"{store.path} has a frame in {store.frame_stride} rows, not every {self.every}. {remedy}."
                )
            total = min(episodes or store.num_episodes, store.num_episodes)
            for number in range(total):
                begin, end = (int(store.offsets[number]), int(store.offsets[number] + store.lengths[number]))
                rows = store.frame_rows[(store.frame_rows >= begin) & (store.frame_rows < end)]
                rows = rows[:: self.every // store.frame_stride]
                needs = self._foresight.frames_needed(self.every)
                many = len(rows) >= needs
                yield self._scores_of(store.read_frames(rows), store.actions[rows[0] : end]) if many else np.zeros(0)
                if on_progress:
                    on_progress(number + 1, total)

    def _scores_of(self, frames: Array, actions: Array) -> Array:
        """Scores of frames ``every`` steps apart, uint8 (N, S, S, 3), and of the raw actions from the first one on."""
        if len(frames) < self._foresight.frames_needed(self.every):
            return np.zeros(0)
        return self._foresight.errors(self._foresight.embed(frames), actions, self.every)


def _checked_frame(frame: Array) -> Array:
    pixels = np.asarray(frame)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[0] != pixels.shape[1] or pixels.shape[2] != 3:
        raise DataError(f"A frame is uint8 (S, S, 3), got {pixels.dtype} of shape {pixels.shape}.")
    return pixels


def _checked_threshold(threshold: float) -> float:
    if not 0 < threshold < float("inf"):
        raise ConfigError(f"A threshold is a positive number, got {threshold}.")
    return float(threshold)
