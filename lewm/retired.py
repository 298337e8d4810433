"""Settings that are gone or have moved: what old files said, and what somebody who types an old flag is told.

A setting goes here when no preset uses it and no measurement supports it. Old files load all the same: at its default
it changed nothing, and any other value is named together with what to do instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lewm.checked import from_dict, to_dict
from lewm.config import Config
from lewm.errors import ConfigError


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
MOVED = {
    "plan.noise_exponent": "plan.icem.noise_exponent",
    "plan.recorded": "plan.icem.recorded",
    "plan.kept_elites": "plan.icem.kept_elites",
    "plan.momentum": "plan.icem.momentum",
    "plan.temperature": "plan.mppi.temperature",
    "plan.restarts": "plan.gradient.restarts",
    "plan.lr": "plan.gradient.lr",
}


def read_config(document: Any, lost: list[str] | None = None) -> Config:
    """A run's settings from JSON that this or an earlier version wrote.

    lost: takes a sentence for each choice that cannot be kept; without it, such a choice raises.
    """
    if not isinstance(document, dict):
        raise ConfigError(f"The configuration must be an object of settings, got {document!r}.")
    sentences: list[str] = []
    config = from_dict(Config, current(document, sentences))
    if sentences and lost is None:
        raise ConfigError(" ".join(sentences))
    if lost is not None:
        lost += sentences
    return config


def current(document: dict[str, Any], lost: list[str]) -> dict[str, Any]:
    """The same settings under today's names, nested; what is gone is left out, and named in ``lost`` if chosen."""
    settings: dict[str, Any] = {}
    for name, value in _leaves(document):
        if name in RETIRED:
            if value != RETIRED[name].default:
                lost.append(_sentence(name, value, RETIRED[name]))
            continue
        if (gone := RETIRED_VALUES.get(name, {}).get(value) if isinstance(value, str) else None) is not None:
            lost.append(_sentence(name, value, gone))
            value = gone.default
        _put(settings, MOVED.get(name, name).split("."), value)
    return settings


def changed(config: Config, settings: dict[str, Any]) -> Config:
    """``config`` with other settings, by dotted names of this or of an earlier version."""
    nested: dict[str, Any] = {}
    for name, value in settings.items():
        _put(nested, name.split("."), value)
    document, sentences = to_dict(config), list[str]()
    for name, value in _leaves(current(nested, sentences)):
        _put(document, name.split("."), value)
    if sentences:
        raise ConfigError(" ".join(sentences))
    return from_dict(Config, document)


def advice(flag: str) -> str | None:
    """What to type instead of an old flag such as ``--plan.recorded``; None: it is not an old one."""
    name = flag.removeprefix("--").replace(".no-", ".").replace("-", "_")
    if name in RETIRED:
        return f"{flag} is gone since lewm {RETIRED[name].since}: {RETIRED[name].instead}."
    if name in MOVED:
        return f"{flag} is now --{MOVED[name].replace('_', '-')}."
    return None


def _sentence(name: str, value: Any, gone: Retired) -> str:
    return f"{name} was {value!r}, which is gone since lewm {gone.since}: {gone.instead}."


def _leaves(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in document.items():
        found += _leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else [(prefix + name, value)]
    return found


def _put(settings: dict[str, Any], path: list[str], value: Any) -> None:
    *sections, last = path
    for section in sections:
        settings = settings.setdefault(section, {})
    settings[last] = value
