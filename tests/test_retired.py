"""Settings that are gone or have moved: old files are read, and whoever chose one is told."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lewm.checked import flat, from_dict, to_dict
from lewm.config import Config, IcemConfig
from lewm.errors import ConfigError
from lewm.presets import preset
from lewm.retired import MOVED, RETIRED, RETIRED_VALUES, advice, changed, current, read_config


def as_written_by_0_1(config: Config, **chosen: Any) -> dict[str, Any]:
    """The JSON of a run as lewm 0.1.0 wrote it, with these settings by their old names."""
    settings = flat(config)
    old = {name: settings.pop(new) for name, new in MOVED.items()}
    old |= {name: gone.default for name, gone in RETIRED.items()} | chosen
    document: dict[str, Any] = {}
    for name, value in (settings | old).items():
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
    assert from_dict(Config, document) == preset("cube")


def test_settings_are_changed_by_old_and_new_names():
    found = changed(preset("cube"), {"plan.recorded": 3, "plan.icem.momentum": 0.3, "eval.episodes": 200})
    assert (found.plan.icem.recorded, found.plan.icem.momentum, found.eval.episodes) == (3, 0.3, 200)
    with pytest.raises(ConfigError, match=r"plan\.effort was 0\.5, which is gone"):
        changed(preset("cube"), {"plan.effort": 0.5})


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--plan.noise-exponent", "--plan.noise-exponent is now --plan.icem.noise-exponent."),
        ("--plan.recorded", "--plan.recorded is now --plan.icem.recorded."),
        ("--train.coarse-steps", "--train.coarse-steps is gone since lewm 0.2.0: train at full resolution"),
        ("--train.steps", None),
        ("plan.recorded/", None),
    ],
)
def test_whoever_types_an_old_flag_is_told_the_new_one(flag: str, message: str | None):
    found = advice(flag)
    assert (found is None) if message is None else found is not None and found.startswith(message)
