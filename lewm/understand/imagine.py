"""`lewm understand imagine`: how far imagined futures are from what happens, and whether a search exploits that.

Futures are rolled out open loop: a few real frames, then predictions alone. Under recorded actions their error is given
by step, beside that of a frame that never changes. Where the world's simulator is there, three plans compete from the
same starts to the same goals, frames of the recorded episode: the recorded actions, random ones, and those of a search.
A search whose plans end nearer to the goal in imagination than in reality has found where the model is wrong.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch

from lewm.checked import Checked, to_dict
from lewm.config import PlanConfig
from lewm.data.store import EpisodeStore
from lewm.envs.base import WorldEnv
from lewm.envs.registry import env_type, make_env
from lewm.errors import ConfigError, DataError
from lewm.evaluate.comparison_tables import Table
from lewm.plan.planner import Planner
from lewm.rng import stream
from lewm.types import Array, ProgressCallback, WorldModel
from lewm.understand.figures import COLOURS, FAINT, INK, canvas, styled
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.looking import frame_rows
from lewm.understand.states import STATE, recorded_states
from lewm.understand.subject import Subject, question

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VERB = "imagine"
COST = "some hundred frames embedded, and a few searches"
_AT_ONCE = 16  # windows


@dataclass(frozen=True)
class ImagineSettings(Checked):
    """blocks: how far ahead.  windows: under recorded actions.  searches: starts from which a plan is searched for."""

    SECTION: ClassVar[str] = "imagine"

    blocks: int = 5
    windows: int = 128
    searches: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("blocks", most=100)
        self._require(2 <= self.windows <= 10**5, "windows", "between 2 and 100,000")
        self._require(0 <= self.searches <= self.windows, "searches", "at least 0 and at most as many as windows")


@dataclass(frozen=True)
class Windows:
    """Pieces of episodes. rows: of T + H frames, int (N, T + H).  actions: raw, float32 (N, T + H - 1, K, action_dim).

    context: T.
    """

    rows: Array
    actions: Array
    context: int


def fits(subject: Subject) -> str | None:
    """Why it imagines nothing; None: it does."""
    model = subject.model
    if not (hasattr(model, "planning_rollout") and hasattr(model, "planning_encoder")):
        return f"the method {model.settings.NAME!r} predicts no frames"
    if model.proprio_dim:
        return "it reads what the agent senses of itself, which is not given here"
    return None


def imagine(
    subject: Subject, store: EpisodeStore, settings: ImagineSettings, on_progress: ProgressCallback | None = None
) -> Findings:
    """Errors by step under recorded actions, and what becomes of three kinds of plans."""
    if reason := fits(subject):
        raise ConfigError(f"{subject.source} imagines nothing: {reason}.")
    windows = choose_windows(subject, store, settings)
    count, searches = len(windows.rows), min(settings.searches, len(windows.rows))
    searched, states = 0, None
    if subject.world is not None and STATE in store.columns:
        searched, states = searches, recorded_states(store, env_type(subject.world.name).state_names)
    total = count + searched

    def tell(done: int) -> None:
        if on_progress:
            on_progress(done, total)

    real, imagined = roll_out(subject, store, windows, tell)
    numbers: dict[str, Any] = {"steps": by_step(real, imagined, windows.context), "model": subject.name}
    numbers["windows"], numbers["frame_skip"] = count, subject.model.frame_skip
    if searched and states is not None:
        numbers["plans"] = _plans(subject, store, states, windows, searched, lambda done: tell(count + done))
    return _findings(question(VERB, subject, store, to_dict(settings)), numbers, windows)


def investigate(
    subject: Subject, store: EpisodeStore, out: Path, seed: int, quick: bool, on_progress: ProgressCallback | None
) -> Findings:
    """Find, or read what was found before; written into ``out``."""
    sizes = {"windows": 32, "searches": 4} if quick else {}
    return imagined(subject, store, ImagineSettings(seed=seed, **sizes), out, on_progress)


def imagined(
    subject: Subject, store: EpisodeStore, settings: ImagineSettings, out: Path, on_progress: ProgressCallback | None
) -> Findings:
    """``imagine``, or what an earlier call found; written into ``out``."""
    found = read_findings(out, VERB, question(VERB, subject, store, to_dict(settings)))
    if found is None:
        found = imagine(subject, store, settings, on_progress)
        write_findings(out, found, draw)
    return found


# -- recorded actions ----------------------------------------------------------------------------------------------


def choose_windows(subject: Subject, store: EpisodeStore, settings: ImagineSettings) -> Windows:
    """At most so many windows of the model's history and the blocks after it, of as many episodes as there are."""
    model = subject.model
    context, length = model.history, model.history + settings.blocks
    rng = stream(settings.seed)
    found: list[tuple[int, Array]] = []  # windows, each with its turn: an episode's second comes after all first ones
    for rows in frame_rows(subject, store):
        starts = rng.permutation(max(0, len(rows) - length + 1))
        found += [(turn, rows[start : start + length]) for turn, start in enumerate(starts)]
    if len(found) < 2:
        problem = f"{store.path} has {len(found)} windows of {length} frames, and two are compared"
        raise DataError(f"{problem}. Give more episodes, longer ones, or fewer --blocks.")
    order = sorted(rng.permutation(len(found)).tolist(), key=lambda number: found[number][0])
    chosen = np.stack([found[number][1] for number in sorted(order[: settings.windows])])
    actions = store.actions[chosen[:, :-1, None] + np.arange(model.frame_skip)]
    return Windows(chosen, actions, context)


@torch.inference_mode()
def roll_out(
    subject: Subject, store: EpisodeStore, windows: Windows, on_window: Callable[[int], object]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embeddings of all real frames (N, T + H, D), and imagined ones (N, H, D) of those behind the context."""
    model = cast(WorldModel, subject.model)
    encode, rollout = model.planning_encoder("float32"), model.planning_rollout("float32", differentiable=False)
    real, imagined = [], []
    for first in range(0, len(windows.rows), _AT_ONCE):
        rows = windows.rows[first : first + _AT_ONCE]
        frames = torch.from_numpy(store.read_frames(rows.reshape(-1))).to(subject.device)
        z_BTD = encode(frames).unflatten(0, rows.shape)
        raw = torch.from_numpy(windows.actions[first : first + _AT_ONCE]).to(subject.device)
        blocks_BTA = model.normalise_actions(raw)
        past, plan = blocks_BTA[:, : windows.context - 1], blocks_BTA[:, None, windows.context - 1 :]
        imagined.append(rollout(z_BTD[:, : windows.context], past, plan)[:, 0].float().cpu())
        real.append(z_BTD.float().cpu())
        on_window(first + len(rows))
    return torch.cat(real), torch.cat(imagined)


def by_step(real_NTD: torch.Tensor, imagined_NHD: torch.Tensor, context: int) -> list[dict[str, float]]:
    """For each block ahead: errors, those of a frame that never changes, and what other windows are apart."""
    last, ahead, rows = real_NTD[:, context - 1], real_NTD[:, context:], []
    for step in range(imagined_NHD.shape[1]):
        truth, guess = ahead[:, step], imagined_NHD[:, step]
        error, still = ((other - truth).square().sum(-1).numpy() for other in (guess, last))
        apart = torch.cdist(guess, truth).square()
        others = torch.cdist(truth, truth).square()
        low, middle, high = np.quantile(error, (0.1, 0.5, 0.9))
        numbers = {"low": low, "median": middle, "high": high, "still": np.median(still)}
        numbers["far"] = others.sum() / (len(others) * (len(others) - 1))
        numbers["mistaken"] = (apart.argmin(1) != torch.arange(len(apart))).float().mean()
        rows.append({"blocks": step + 1.0} | {name: float(value) for name, value in numbers.items()})
    return rows


# -- plans of three kinds ------------------------------------------------------------------------------------------


@torch.inference_mode()
def _plans(
    subject: Subject, store: EpisodeStore, states: Array, windows: Windows, count: int, on_plan: Callable[[int], object]
) -> list[dict[str, Any]]:
    """From the last frame of a context to the last of its window: medians over windows, for each kind of plan."""
    assert subject.world is not None
    model, context = cast(WorldModel, subject.model), windows.context
    starts, ends = windows.rows[:count, context - 1], windows.rows[:count, -1]
    recorded = windows.actions[:count, context - 1 :].reshape(count, -1, store.action_dim)
    horizon, skip = windows.actions.shape[1] - context + 1, subject.model.frame_skip
    planner = Planner(model, config=PlanConfig(horizon=horizon, samples=128, iterations=10, elites=16))
    frames = [store.read_frames(rows) for rows in (starts, ends)]
    searched = []
    for number in range(count):
        with torch.inference_mode(False):
            found = planner.plan(frames[0][number], frames[1][number], key=number).actions
        searched.append(np.asarray(found, np.float32).reshape(len(recorded[number]), -1))
        on_plan(number + 1)
    white = torch.from_numpy(stream(0).normal(size=(count, horizon, skip * store.action_dim)).astype(np.float32))
    random = model.denormalise_actions(white.to(subject.device)).flatten(1, 2).cpu().numpy()
    encode, rollout = model.planning_encoder("float32"), model.planning_rollout("float32", differentiable=False)
    start_ND, goal_ND = (encode(torch.from_numpy(each).to(subject.device)) for each in frames)
    rows = []
    with contextlib.closing(make_env(subject.world.name, subject.model.image_size, "state")) as env:
        possible = np.clip(random, env.action_space.low, env.action_space.high)
        kinds = {"recorded actions": recorded, "random actions": possible, "a search's": np.stack(searched)}
        for kind, actions in kinds.items():
            done = [_execute(env, states[a], states[b], plan) for a, b, plan in zip(starts, ends, actions, strict=True)]
            real_ND = encode(torch.from_numpy(env.render_states(np.stack([s for s, _ in done]))).to(subject.device))
            raw = torch.from_numpy(np.ascontiguousarray(actions)).to(subject.device).unflatten(1, (-1, skip))
            plan_NHA = model.normalise_actions(raw)
            end_ND = rollout(start_ND[:, None], plan_NHA[:, :0], plan_NHA[:, None])[:, 0, -1]
            ways = {"imagined": end_ND - goal_ND, "real": real_ND - goal_ND, "error": end_ND - real_ND}
            squares = {name: way.square().sum(-1).cpu().numpy() for name, way in ways.items()}
            better = float((squares["imagined"] <= squares["real"]).mean())
            medians = {name: float(np.median(values)) for name, values in squares.items()}
            reached = sum(ok for _, ok in done)
            rows.append({"kind": kind, "reached": reached, "plans": count, "flattered": better} | medians)
    return rows


def _execute(env: WorldEnv, start: Array, goal: Array, actions: Array) -> tuple[Array, bool]:
    """The state (S,) after raw actions (T, action_dim), and whether the goal was reached on the way."""
    env.reset(options={"state": start, "goal": goal})
    reached = False
    for action in actions:
        env.step(np.clip(action, env.action_space.low, env.action_space.high))
        reached = reached or env.goal_reached()
    return env.state, reached


# -- what people see -----------------------------------------------------------------------------------------------


def _findings(asked: dict[str, Any], numbers: dict[str, Any], windows: Windows) -> Findings:
    steps, skip = numbers["steps"], numbers["frame_skip"]
    title = f"Under recorded actions, {len(windows.rows)} windows of {windows.context} real frames"
    header = ("blocks ahead", "error, median", "middle 80 %", "if nothing moved", "other windows", "mistaken")
    cells = tuple(
        (
            f"{row['blocks']:.0f}",
            f"{row['median']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['still']:.2f}",
            f"{row['far']:.0f}",
            f"{row['mistaken']:.0%}",
        )
        for row in steps
    )
    tables, sentences = [Table(title, header, cells)], list(_SENTENCES)
    sentences[0] = sentences[0].format(skip=skip)
    if plans := numbers.get("plans"):
        header = ("plans", "imagined to the goal", "really to the goal", "imagined to real end", "flattered", "reached")
        cells = tuple(
            (
                row["kind"],
                *(f"{row[name]:.2f}" for name in ("imagined", "real", "error")),
                f"{row['flattered']:.0%}",
                f"{row['reached']} of {row['plans']}",
            )
            for row in plans
        )
        tables.append(Table(f"Where plans end, medians of {plans[0]['plans']}, from one frame", header, cells))
        sentences.append("Flattered: the share of plans that end nearer to the goal in imagination than in reality.")
    else:
        sentences.append("No plans were searched for: that takes the world's simulator and recorded states.")
    return Findings(VERB, "How far imagination reaches", asked, tuple(tables), tuple(sentences), numbers, {})


_SENTENCES = (
    "Errors are squared distances between the imagined and the real embedding; a block is {skip} environment steps.",
    "Mistaken: the share of imagined frames that are nearer to another window's real frame than to their own.",
)


@styled
def draw(findings: Findings) -> Figure:
    """Error over blocks ahead, between what nothing moving would have and what lies at random."""
    figure, ((axes,),) = canvas(1, 1, 5.2, 3.2)
    rows = findings.numbers["steps"]
    low, median, high = (np.maximum([row[name] for row in rows], 1e-6) for name in ("low", "median", "high"))
    blocks = [row["blocks"] for row in rows]
    axes.fill_between(blocks, low, high, color=COLOURS[0], alpha=0.2, linewidth=0, label="middle 80 %")
    axes.plot(blocks, median, "o-", color=COLOURS[0], markersize=4, label="imagined, median")
    still = np.maximum([row["still"] for row in rows], 1e-6)
    axes.plot(blocks, still, "s--", color=COLOURS[5], markersize=3, label="if nothing moved")
    axes.plot(blocks, [row["far"] for row in rows], color=INK, linewidth=1, linestyle="dotted", label="other windows")
    axes.set_yscale("log")
    axes.set(xlabel="action blocks ahead", ylabel="squared distance to the real frame", xticks=blocks)
    axes.grid(axis="y", color=FAINT, linewidth=0.6)
    axes.legend()
    return figure
