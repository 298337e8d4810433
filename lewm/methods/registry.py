"""Every method by name. What is not asked for is not imported: a method brings torch with it."""

from __future__ import annotations

import importlib
from typing import Any, cast

from lewm.checked import from_dict
from lewm.config import MethodConfig
from lewm.errors import ConfigError, unknown_name

# Where the configuration of each is: "module:Class".
METHODS = {
    "lewm": "lewm.methods.lewm:LeWMConfig",
    "pldm": "lewm.methods.pldm:PLDMConfig",
    "gcbc": "lewm.methods.gcbc:GCBCConfig",
}


def method_config(name: str) -> type[MethodConfig]:
    """The configuration class of a method, by its name; an unknown one raises with the nearest."""
    if name not in METHODS:
        raise ConfigError(unknown_name("method", name, METHODS))
    module, _, attribute = METHODS[name].partition(":")
    found = cast(type[MethodConfig], getattr(importlib.import_module(module), attribute))
    assert name == found.NAME
    return found


def read_settings(values: Any) -> MethodConfig:
    """A method's settings from plain JSON values, whose ``name`` says which method it is; without one, LeWM."""
    if not isinstance(values, dict):
        raise ConfigError(f"method must be an object of settings, got {values!r}.")
    name, rest = values.get("name", "lewm"), {key: value for key, value in values.items() if key != "name"}
    if not isinstance(name, str):
        raise ConfigError(f"method.name must be a text, got {name!r}.")
    return from_dict(method_config(name), rest, "method.")
