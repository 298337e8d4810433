"""Settings that are gone or have moved: what old files said, and what somebody who types an old flag is told.

A setting goes here when no preset uses it and no measurement supports it. Old files load all the same: at its default
it changed nothing, and any other value is named together with what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Retired:
    """A setting that is gone. default: what it was unless somebody chose.  since: the version that has it no more."""

    default: Any
    since: str
    instead: str


_FULL = "train at full resolution; method.encoder.kept_patches leaves out background"
RETIRED: dict[str, Retired] = {
    "loader.split_seed": Retired(3072, "0.2.0", "the split is always that of seed 3072"),
    "sigreg.t_min": Retired(0.0, "0.2.0", "the quadrature is always over [0, 3]"),
    "sigreg.t_max": Retired(3.0, "0.2.0", "the quadrature is always over [0, 3]"),
    "train.coarse_steps": Retired(0, "0.2.0", _FULL),
    "train.schedule": Retired("cosine", "0.2.0", "the learning rate always falls as a cosine"),
    "train.ema": Retired(0.0, "0.2.0", "let the learning rate fall further with train.final_lr_fraction"),
    "train.attention": Retired("auto", "0.2.0", "the fastest kernel that fits is taken"),
    "train.prefetch": Retired(2, "0.2.0", "two batches are prepared ahead"),
    "train.keep_checkpoints": Retired(2, "0.2.0", "the two newest checkpoints are kept"),
    "plan.effort": Retired(0.0, "0.2.0", "bound actions with plan.action_limit"),
    "plan.execute": Retired(None, "0.2.0", "plan.schedule says how much of a plan is executed"),
    "plan.stop_spread": Retired(None, "0.2.0", "lower plan.iterations, or set plan.budget_ms"),
}
# Values of settings that are still there.
RETIRED_VALUES: dict[str, dict[str, Retired]] = {
    "train.precision": {"mixed": Retired("auto", "0.2.0", "use bf16 or float32")},
    "train.compile": {"max-autotune": Retired("auto", "0.2.0", "use on")},
    "plan.objective": {"summed": Retired("terminal", "0.2.0", "use terminal or nearest")},
}
# Whole sections; a run without a method is one of LeWM.
MOVED_SECTIONS = {"model.": "method.", "sigreg.": "method.sigreg."}
MOVED = {
    "plan.noise_exponent": "plan.icem.noise_exponent",
    "plan.recorded": "plan.icem.recorded",
    "plan.kept_elites": "plan.icem.kept_elites",
    "plan.momentum": "plan.icem.momentum",
    "plan.temperature": "plan.mppi.temperature",
    "plan.restarts": "plan.gradient.restarts",
    "plan.lr": "plan.gradient.lr",
}


def current(document: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """The same settings under today's names, nested; what is gone is left out, and named in ``lost`` if chosen."""
    settings: dict[str, Any] = {}
    for name, value in leaves(document):
        if name in RETIRED:
            if value != RETIRED[name].default:
                lost.append(_sentence(name, value, RETIRED[name]))
            continue
        if (gone := RETIRED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None) is not None:
            lost.append(_sentence(name, value, gone))
            value = gone.default
        put(settings, _todays(name), value)
    return settings


def _todays(name: str) -> str:
    """What a setting of this name is called today."""
    for old, new in MOVED_SECTIONS.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return MOVED.get(name, name)


def advice(flag: str) -> str | None:
    """What to type instead of an old flag such as ``--plan.recorded``; None: it is not an old one."""
    name = flag.removeprefix("--").replace(".no-", ".").replace("-", "_")
    if name in RETIRED:
        return f"{flag} is gone since lewm {RETIRED[name].since}: {RETIRED[name].instead}."
    if (todays := _todays(name)) != name and flag.startswith("--"):
        return f"{flag} is now --{todays.replace('_', '-')}."
    return None


def _sentence(name: str, value: Any, gone: Retired) -> str:
    return f"{name} was {value!r}, which is gone since lewm {gone.since}: {gone.instead}."


def leaves(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Every setting by its dotted name."""
    found: list[tuple[str, Any]] = []
    for name, value in document.items():
        found += leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [(prefix + name, value)]
    return found


def put(settings: dict[str, Any], name: str, value: Any) -> None:
    """Set one setting, by its dotted name, in nested ones."""
    *sections, last = name.split(".")
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[last] = value
