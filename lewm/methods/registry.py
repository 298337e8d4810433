"""Every method by name. What is not asked for is not imported: a method brings torch with it.

Modules named in the environment variable ``LEWM_METHODS``, separated by commas, are imported when a name is looked up:
what they register is known to every command and its processes.
"""

from __future__ import annotations

import importlib
from typing import Any, cast

from lewm.checked import from_dict
from lewm.config import MethodConfig
from lewm.errors import ConfigError, unknown_name
from lewm.user_modules import import_user_modules

# Where the configuration of each is: "module:Class".
METHODS = {
    "lewm": "lewm.methods.lewm:LeWMConfig",
    "pldm": "lewm.methods.pldm:PLDMConfig",
    "dino_wm": "lewm.methods.dino_wm:DinoWMConfig",
    "gcbc": "lewm.methods.gcbc:GCBCConfig",
    "gcivl": "lewm.methods.gcivl:GCIVLConfig",
    "gciql": "lewm.methods.gciql:GCIQLConfig",
    "gc_idm": "lewm.methods.gc_idm:GCIDMConfig",
}
USER_MODULES = "LEWM_METHODS"  # the environment variable


def register_method(name: str, config: str) -> None:
    """Make a method known by its name. config: "module:Class" of its configuration. Doing it again changes nothing."""
    if METHODS.setdefault(name, config) != config:
        raise ConfigError(f"A method {name!r} is registered already, at {METHODS[name]}. Choose another name.")


def method_names() -> tuple[str, ...]:
    """The names of all methods."""
    import_user_modules(USER_MODULES, ConfigError)
    return tuple(METHODS)


def method_config(name: str) -> type[MethodConfig]:
    """The configuration class of a method, by its name; an unknown one raises with the nearest."""
    if name not in method_names():
        own = f"One of your own has to be registered by a module that {USER_MODULES} names."
        raise ConfigError(f"{unknown_name('method', name, METHODS)} {own}")
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
