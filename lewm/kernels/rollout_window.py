"""The window of a rollout as it moves through time: which tokens are new at each step, and whose they are.

A window that grows keeps what it knows of its tokens: causal tokens do not change when one is added behind them. Once
it slides, every token has a new position and is computed afresh.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """What the prediction of one more token needs. Tokens are counted from the first real frame.

    start: where the window begins.
    begins: whether it has not begun there before, so that nothing is known of its tokens.
    shared: its new tokens that all candidates share, real frames whose actions are executed already; often none.
    own: its new tokens that each candidate has for itself; the last one predicts.
    grows: whether the next step's window begins at the same place.
    """

    start: int
    begins: bool
    shared: range
    own: range
    grows: bool


def walk(context: int, horizon: int, history: int) -> Iterator[Step]:
    """The steps of a rollout over ``horizon`` blocks from ``context`` real frames, in windows of ``history`` tokens."""
    last_real = context - 1  # the plan's first block acts on it, so it is the first token of a candidate's own
    known = 0  # tokens before this one are either known or out of the window
    for end in range(context, context + horizon):
        start = max(0, end - history)
        begins = end == context or start > 0
        known = start if begins else known
        first_own = max(known, min(end, last_real))
        yield Step(start, begins, range(known, first_own), range(first_own, end), grows=end - start < history)
        known = end
