"""Settings that are gone or have moved: old files are read, and whoever chose one is told."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import lewm
from lewm.checked import flat, to_dict
from lewm.config import Config, IcemConfig
from lewm.errors import ConfigError
from lewm.presets import preset, read_config
from lewm.retired import MOVED, MOVED_SECTIONS, RETIRED, RETIRED_VALUES, advice, current


def old_sections(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings by the names that they had when their section was another one."""
    # The longer of two beginnings first: what is in method.sigreg is in method as well.
    for new, old in sorted(((new, old) for old, new in MOVED_SECTIONS.items()), reverse=True):
        settings = {re.sub(f"^{re.escape(new)}", old, name): value for name, value in settings.items()}
    return settings


def as_written_by_0_1(config: Config, **chosen: Any) -> dict[str, Any]:
    """The JSON of a run as lewm 0.1.0 wrote it, with these settings by their old names."""
    settings = flat(config)
    assert settings.pop("method.name") == "lewm"  # there was no other
    assert settings.pop("method.encoder.kind") == "vit"
    old = {name: settings.pop(new) for name, new in MOVED.items()}
    old |= {name: gone.default for name, gone in RETIRED.items()} | chosen
    document: dict[str, Any] = {}
    for name, value in (old_sections(settings) | old).items():
        *sections, last = name.split(".")
        place = document
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return document


@pytest.mark.parametrize("name", ["debug", "cube"])
def test_what_an_earlier_version_wrote_is_read(name: str):
    config = preset(name)
    plan = replace(config.plan, solver="icem", icem=IcemConfig(noise_exponent=2.0, recorded=3))
    config = replace(config, plan=plan)
    old = as_written_by_0_1(config)
    assert old["plan"]["recorded"] == 3
    assert "icem" not in old["plan"]
    assert old["model"]["encoder"]["depth"] == config.method.encoder.depth
    assert old["sigreg"]["weight"] == config.method.sigreg.weight
    assert "method" not in old
    assert read_config(old) == config


@pytest.mark.parametrize("name", RETIRED)
def test_a_choice_that_is_gone_is_named_with_what_to_do(name: str):
    old = as_written_by_0_1(preset("debug"), **{name: 77})
    with pytest.raises(ConfigError) as error:
        read_config(old)
    assert f"{name} was 77, which is gone since lewm {RETIRED[name].since}: {RETIRED[name].instead}." in str(
        error.value
    )
    lost: list[str] = []
    assert read_config(old, lost) == preset("debug")
    assert lost == [str(error.value)]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name in RETIRED_VALUES for value in RETIRED_VALUES[name]]
)
def test_a_value_that_is_gone_gives_way_to_the_default(name: str, value: str):
    lost: list[str] = []
    config = read_config(as_written_by_0_1(preset("debug"), **{name: value}), lost)
    assert flat(config)[name] == RETIRED_VALUES[name][value].default
    assert len(lost) == 1
    assert value in lost[0]


def test_no_setting_of_today_is_retired():
    names = set(flat(preset("debug")))
    assert not names & RETIRED.keys()
    assert not names & MOVED.keys()
    assert set(MOVED.values()) <= names
    assert RETIRED_VALUES.keys() <= names


def test_todays_settings_stay_as_they_are():
    document = to_dict(preset("cube"))
    assert current(document, []) == document
    assert read_config(document) == preset("cube")


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--plan.noise-exponent", "--plan.noise-exponent is now --plan.icem.noise-exponent."),
        ("--plan.recorded", "--plan.recorded is now --plan.icem.recorded."),
        ("--model.encoder.image-size", "--model.encoder.image-size is now --method.encoder.image-size."),
        ("--sigreg.weight", "--sigreg.weight is now --method.sigreg.weight."),
        ("--sigreg.t-max", "--sigreg.t-max is gone since lewm 0.2.0: the quadrature is always over [0, 3]"),
        ("--method.sigreg.weight", None),
        ("--train.coarse-steps", "--train.coarse-steps is gone since lewm 0.2.0: train at full resolution"),
        ("--train.steps", None),
        ("plan.recorded/", None),
    ],
)
def test_whoever_types_an_old_flag_is_told_the_new_one(flag: str, message: str | None):
    found = advice(flag)
    assert (found is None) if message is None else found is not None and found.startswith(message)


ROOT = Path(lewm.__file__).parents[1]


@pytest.mark.parametrize("pattern", ["runs/*.*", "benchmarks/**/*.py", "scripts/*"])
def test_no_script_uses_an_old_flag(pattern: str):
    texts = {path: path.read_text() for path in ROOT.glob(pattern) if path.is_file()}
    assert texts
    old = [
        (path.name, flag)
        for path, text in texts.items()
        for flag in re.findall(r"--[a-z][\w.-]+", text)
        if advice(flag)
    ]
    assert old == []
