"""One evaluation as one HTML page that needs nothing else: no network, no scripts, every picture inside it.

The words and the look are in ``report_template.html``; this module fills in numbers, pictures and charts. Charts are
SVG whose colours are the page's CSS variables, so that they follow its light and dark mode.
"""

from __future__ import annotations

import base64
import importlib.resources
import io
import json
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from lewm.checked import to_dict
from lewm.envs.registry import env_entry
from lewm.evaluate.animation import episodes_gif
from lewm.evaluate.results import LABELS, Evaluation
from lewm.evaluate.stats import Rate
from lewm.files import PAGE, check_output, completing
from lewm.types import HOLD_STEPS, EpisodeResult, Outcome
from lewm.version import __version__

SHOWN_EPISODES, SHOWN_PLANS = 8, 6
# Measurement, title, what it means, and where a healthy model is.
DIAGNOSTICS: list[tuple[str, str, str, float | None]] = [
    ("loss", "Total loss", "What is minimised.", None),
    ("embedding_std", "Embedding standard deviation", "Healthy near 1 (dashed); 0 is collapse.", 1),
    ("effective_rank", "Effective rank", "Directions in which embeddings differ.", None),
    ("straightness", "Straightness", "Cosine of successive latent steps; 1 is a straight path.", None),
]

# Colours that occur in no chart by chance; each gives way to a CSS variable of the page.
_INK, _FAINT, _ACCENT, _SECOND, _GOOD, _BAD = (f"#01020{i}" for i in range(6))
_CSS_NAMES = {_INK: "muted", _FAINT: "line", _ACCENT: "accent", _SECOND: "second", _GOOD: "good", _BAD: "bad"}
_CHART_STYLE: Any = {
    "figure.figsize": (3.3, 2.1),
    "figure.constrained_layout.use": True,
    "font.size": 8.5,
    "lines.markersize": 3,
    "axes.grid": True,
    "axes.grid.which": "both",
    "axes.prop_cycle": f"cycler(color=['{_ACCENT}', '{_SECOND}'])",
    "svg.fonttype": "none",
    "svg.hashsalt": "lewm",  # a fixed salt: the same data gives the same ids, and so the same page
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), _INK),
    **dict.fromkeys(("axes.edgecolor", "grid.color"), _FAINT),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    **dict.fromkeys(("xtick.major.size", "ytick.major.size", "ytick.minor.size"), 0),
}


def write_report(
    path: Path,
    evaluation: Evaluation,
    metrics: list[dict[str, Any]],
    summary: dict[str, str],
    understanding: tuple[str, str] | None = None,
) -> Path:
    """Write the report of an evaluation to ``path``, atomically, and return it.

    metrics: rows of the run's metrics.jsonl, possibly none.  summary: facts about the run worth reading.
    understanding: where, as seen from ``path``, the page is of what the model has understood, and the command for it.
    """
    check_output(path, PAGE)
    config, rates = evaluation.config, evaluation.rates()
    success, *_ = rates.values()
    entry = env_entry(config.env)
    shown = choose_episodes(evaluation.results)
    solved = sum(result.success for result in shown)
    template = (importlib.resources.files("lewm.evaluate") / "report_template.html").read_text(encoding="utf-8")
    with matplotlib.rc_context(_CHART_STYLE):
        page = Template(template).substitute(
            environment=escape(entry.gym_id),
            description=escape(entry.description),
            success=f"{100 * success.value:.1f}",
            bars="".join(_bar(LABELS[name].capitalize(), rate) for name, rate in rates.items()),
            pairs=success.total,
            goal_offset=evaluation.goal_offset,
            budget=config.eval.budget,
            hold=HOLD_STEPS,
            gif=base64.b64encode(episodes_gif(config.env, shown)).decode(),
            shown=f"{solved} of {success.successes} solved and {len(shown) - solved} of "
            f"{success.total - success.successes} failed episodes",
            plans=_plan_charts(shown),
            curves=_curve_charts(metrics),
            rows="".join(map(_outcome_row, evaluation.results, evaluation.random_results)),
            facts="".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in summary.items()),
            understanding=_understanding(*understanding) if understanding else "",
            settings=escape(json.dumps(to_dict(config), indent=2)),
            version=escape(__version__),
        )
    with completing(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def choose_episodes(results: Sequence[EpisodeResult]) -> list[EpisodeResult]:
    """The episodes to show: two failures before the solved ones, and more of them only where room is left."""
    solved = [result for result in results if result.success]
    failed = [result for result in results if not result.success]
    return (failed[:2] + solved + failed[2:])[:SHOWN_EPISODES]


def _understanding(link: str, command: str) -> str:
    """A way to the page of what the model has understood, which exists once its command has run."""
    page = f'<a href="{escape(link)}">What the model has understood</a>'
    made = f"<code>{escape(command)}</code> makes that page, in a minute or two."
    said = f"<h2>What it has understood</h2><p>{page} is on a page of its own. {made}</p>"
    return f'<section id="understanding">{said}</section>'


def _bar(label: str, rate: Rate) -> str:
    low, high = (100 * bound for bound in rate.interval)
    return f"""
<span>{escape(label)}</span>
<div class="track" role="img" aria-label="{escape(f"{label}: {rate}")}">
<div class="fill" style="width:{100 * rate.value:.2f}%"></div>
<div class="whisker" style="left:{low:.2f}%;width:{high - low:.2f}%"></div></div>
<small>{escape(str(rate))}</small>"""


def _outcome_row(result: EpisodeResult, random: Outcome) -> str:
    """A row of the table: an episode, and what random actions did in it."""
    outcome = f'<span class="{"good" if result.success else "bad"}">{_outcome(result)}</span>'
    strict = {True: "yes", False: "no", None: "solved at the start"}[result.strict_success]
    cost = f"{result.plans[-1].cost:.3g}" if result.plans else "–"
    cells = (result.index, outcome, strict, _outcome(random), len(result.plans), cost)
    return f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"


def _outcome(result: Outcome) -> str:
    return f"solved at step {result.first_success}" if result.success else f"not reached in {result.steps} steps"


def _curve_charts(metrics: list[dict[str, Any]]) -> str:
    """Learning curves: training and, where there is one, validation; a dashed line where a healthy model is."""
    if not metrics:
        return '<p class="note">There is no training record beside this model, so there are no curves to show.</p>'
    measured = dict.fromkeys(name for row in metrics for name in row)
    terms = [name for name in measured if name.endswith("_loss") and not name.startswith("val/")]
    charts: list[tuple[str, str, str, float | None]] = [
        (name, f"{name.removesuffix('_loss')} loss".capitalize(), "A term of the loss.", None) for name in terms
    ]
    charts += [chart for chart in DIAGNOSTICS if chart[0] in measured]
    figures = []
    for key, title, note, target in charts:
        axes = Figure().subplots()
        for name, label, style in ((key, "training", "-"), (f"val/{key}", "validation", "o-")):
            if points := [(row["step"], row[name]) for row in metrics if name in row]:
                axes.plot(*zip(*points, strict=True), style, label=label)
        if len(axes.lines) > 1:
            axes.legend()
        if key.endswith("loss") and all(np.min(line.get_ydata()) > 0 for line in axes.lines):
            axes.set_yscale("log", subs=(2, 5))
            axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
        if target is not None:
            axes.axhline(target, color=_INK, linewidth=1, linestyle=(0, (4, 3)))
            axes.set_ylim(bottom=0)
        axes.locator_params(axis="x", nbins=5, integer=True)
        figures.append(_inline(axes, key, title, note, "training step"))
    return "".join(figures)


def _plan_charts(shown: Sequence[EpisodeResult]) -> str:
    """Per episode, the imagined distance to the goal over steps ahead; later plans stronger, the same scale for all."""
    planned = [result for result in shown if result.plans][:SHOWN_PLANS]
    if not planned:
        return '<p class="note">These episodes were run without plans, so there is nothing imagined to show.</p>'
    distances = np.concatenate([plan.distances for result in planned for plan in result.plans])
    top = 1.05 * float(np.max(distances, where=np.isfinite(distances), initial=0)) or 1.0
    figures = []
    for result in planned:
        axes = Figure().subplots()
        for i, plan in enumerate(result.plans, start=1):
            steps = np.linspace(0, len(plan.actions), len(plan.distances) + 1)[1:]
            # Where replanning is frequent, naming the first and the last plan is enough.
            label = f"plan {i}" if i in (1, len(result.plans)) else None
            colour, strength = (_GOOD if result.success else _BAD), 0.4 + 0.6 * i / len(result.plans)
            axes.plot(steps, plan.distances, "o-", color=colour, alpha=strength, label=label)
        axes.set(xticks=steps, xlim=(0, None), ylim=(0, top))
        axes.legend()
        note = f"{_outcome(result).capitalize()}."
        figures.append(_inline(axes, f"plan-{result.index}", f"Episode {result.index}", note, "steps ahead"))
    return "".join(figures)


def _inline(axes: Any, name: str, title: str, note: str, xlabel: str) -> str:
    """A chart as part of the page: its size and colours are the page's, its ids begin with ``name``, unique there."""
    axes.set_xlabel(xlabel)
    buffer = io.StringIO()
    no_metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    axes.figure.savefig(buffer, format="svg", transparent=True, metadata=no_metadata)
    svg = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{name}-", buffer.getvalue())
    tag = rf'<svg \1 role="img" aria-label="{escape(f"{title}. {note}")}">'
    svg = re.sub(r'(?s).*?<svg [^>]*(viewBox="[^"]*")[^>]*>', tag, svg, count=1)
    for colour, css_name in _CSS_NAMES.items():
        svg = svg.replace(colour, f"var(--{css_name})")
    return f"<figure><figcaption><b>{escape(title)}</b><span>{escape(note)}</span></figcaption>{svg}</figure>"
