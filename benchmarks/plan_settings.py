"""Success with several ways of planning, on pairs to choose settings on (docs/guide/compare.md).

    runs/tuning_manifests.sh reacher 100 runs/tuning
    python benchmarks/plan_settings.py --model pretrained/reacher --env reacher \
        --manifest runs/tuning/reacher_tuning.json --settings schedule=whole schedule=shrinking,solver=icem

Each setting changes some fields of ``lewm.config.PlanConfig``, those of a solver by its name, as in
icem.noise_exponent=2; an empty one, '', changes none.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import tyro
from solvers import measure, print_table

from lewm.checked import from_dict
from lewm.config import PlanConfig
from lewm.envs.registry import env_entry
from lewm.errors import ConfigError
from lewm.evaluate.manifest import load_manifest
from lewm.methods.lewm import LeWM
from lewm.retired import put


def parse_setting(setting: str) -> PlanConfig:
    """The configuration with the fields of a setting such as solver=icem,icem.noise_exponent=2."""
    fields: dict[str, Any] = {}
    for part in filter(None, setting.split(",")):
        name, equals, text = part.partition("=")
        if not equals:
            raise SystemExit(f"{setting!r} is no setting: expected FIELD=VALUE, with commas in between, got {part!r}.")
        put(fields, name, _value(text))
    try:
        return from_dict(PlanConfig, fields, "plan.")
    except ConfigError as error:
        raise SystemExit(f"{setting!r}: {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def main(model: Path, env: str, manifest: Path, settings: list[str], pairs: int = 100) -> None:
    """Print a table with one row per setting."""
    plans = {setting: parse_setting(setting) for setting in settings}  # a typo shows before anything is measured
    world_model, specs = LeWM.from_pretrained(model), load_manifest(env, manifest).first(pairs)
    workers = os.cpu_count() or 1 if env_entry(env).slow else 1
    rows = (measure(name, world_model, plan, env, specs, workers) for name, plan in plans.items())
    print_table(f"{env}, {pairs} pairs, {world_model.device}", rows)


if __name__ == "__main__":
    tyro.cli(main)
