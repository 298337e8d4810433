"""The one way in for settings, from flags and from files: what each may be is said where it stands, and checked here.

A dataclass that inherits ``Checked`` refuses values of another type, numbers that are not finite or absurdly large, and
choices that do not exist, before it looks at anything else. Its own ``__post_init__`` then only says what is special.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from lewm.errors import ConfigError, unknown_name

T = TypeVar("T")
LARGEST = 10**9  # of whole numbers that count something; memory and time end long before
LARGEST_SEED = 2**63 - 1


def free(default: Any) -> Any:
    """A setting that does not decide which weights a run ends with; rounding at most."""
    return dataclasses.field(default=default, metadata={"free": True})


def free_section(make: Any) -> Any:
    """A section of such settings."""
    return dataclasses.field(default_factory=make, metadata={"free": True})


def later(default: Any) -> Any:
    """A setting that came later: files leave it out at its default, or older models would have become others."""
    return dataclasses.field(default=default, metadata={"later": True})


class Checked:
    """Checks shared by all sections of settings. SECTION: how a message calls it, in front of a field's name."""

    SECTION: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            self._check_kind(item.name, getattr(self, item.name), hints[item.name])

    def _named(self, name: str) -> str:
        return f"{self.SECTION}.{name}" if self.SECTION else name

    def _require(self, ok: bool, name: str, wanted: str) -> None:
        if not ok:
            raise ConfigError(f"{self._named(name)} must be {wanted}, got {getattr(self, name)}.")

    def _check_positive(self, *names: str, most: float = LARGEST) -> None:
        for name in names:
            self._require(getattr(self, name) > 0, name, "positive")
            self._require(getattr(self, name) <= most, name, f"at most {most:,}")

    def _check_kind(self, name: str, value: Any, hint: Any) -> None:
        """Type, finiteness and size of one setting."""
        choices = [part for part in _alternatives(hint) if typing.get_origin(part) is Literal]
        if isinstance(value, str) and not _is_writable(value):
            raise ConfigError(f"{self._named(name)} must be a text that can be written, got {value!a}.")
        if choices and isinstance(value, str):
            known = [choice for part in choices for choice in typing.get_args(part)]
            if value not in known:
                raise ConfigError(unknown_name(self._named(name), value, map(str, known)))
            return
        if not any(_fits(value, part) for part in _alternatives(hint)):
            wanted = " or ".join(_called(part) for part in _alternatives(hint))
            raise ConfigError(f"{self._named(name)} must be {wanted}, got {value!r}.")
        numbers = value if isinstance(value, tuple) else (value,)
        if any(isinstance(number, float) and not math.isfinite(number) for number in numbers):
            self._require(False, name, "a finite number" if numbers is not value else "finite numbers")
        if any(isinstance(number, float) and abs(number) > LARGEST for number in numbers):
            self._require(False, name, f"at most {LARGEST:,}")
        if isinstance(value, int) and not isinstance(value, bool):
            largest = LARGEST_SEED if name == "seed" else LARGEST
            self._require(abs(value) <= largest, name, f"at most {largest:,}")


_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    Path: "a path",
    type(None): "nothing",
}


_known_hints: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _known_hints:  # resolving them takes a hundred times as long as the checks
        _known_hints[cls] = typing.get_type_hints(cls)
    return _known_hints[cls]


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _called(kind: Any) -> str:
    """What a message calls a kind of value."""
    if typing.get_origin(kind) is Literal:
        return f"one of {', '.join(map(str, typing.get_args(kind)))}"
    return str(_KINDS.get(kind, getattr(kind, "__name__", kind)))


def _fits(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is Literal:
        return value in typing.get_args(kind)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if kind is Path:
        return isinstance(value, Path)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_fits(item, typing.get_args(kind)[0]) for item in value)
    return not isinstance(kind, type) or isinstance(value, kind)


def of_kind(kind: Any, value: Any, name: str) -> Any:
    """A value from somebody's file, which must be of this kind: a finite number, a text that can be written."""
    if not any(_fits(value, part) for part in _alternatives(kind)):
        raise ValueError(f"{name} must be {' or '.join(map(_called, _alternatives(kind)))}, got {value!r:.100}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be finite, got {value}")
    if isinstance(value, int) and not -LARGEST_SEED <= value <= LARGEST_SEED:
        raise ValueError(f"{name} must be at most {LARGEST_SEED:,}")
    if isinstance(value, str) and not _is_writable(value):
        raise ValueError(f"{name} must be a text that can be written, got {value!a:.100}")
    return value


def _is_writable(text: str) -> bool:
    """Whether it has no halves of characters, which JSON can say and no file can hold."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


# -- to and from JSON ----------------------------------------------------------------------------------------------


def to_dict(settings: Any) -> dict[str, Any]:
    """Settings as plain JSON values; without those that came ``later`` and have their default."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            return to_dict(value)
        return str(value) if isinstance(value, Path) else value

    name = getattr(settings, "NAME", None)
    head = {} if name is None else {"name": name}  # a method's settings say whose they are
    fields = [item for item in dataclasses.fields(settings) if not _is_absent(settings, item)]
    return head | {item.name: plain(getattr(settings, item.name)) for item in fields}


def _is_absent(settings: Any, item: dataclasses.Field[Any]) -> bool:
    return bool(item.metadata.get("later")) and getattr(settings, item.name) == item.default


def from_dict(cls: type[T], values: Any, where: str = "") -> T:
    """Settings from plain JSON values, checked; an unknown field raises with the nearest name."""
    if not isinstance(values, dict):
        raise ConfigError(f"{where.rstrip('.') or 'The configuration'} must be an object of settings, got {values!r}.")
    hints = _hints(cls)
    fields = [item.name for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
    kwargs = {}
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(unknown_name("field", where + name, (where + f for f in fields)))
        section = next((part for part in _alternatives(hints[name]) if dataclasses.is_dataclass(part)), None)
        may_be_absent = value is None and type(None) in _alternatives(hints[name])
        if section is not None and not dataclasses.is_dataclass(value) and not may_be_absent:
            value = from_dict(typing.cast(type, section), value, f"{where}{name}.")
        elif Path in typing.get_args(hints[name]) and isinstance(value, str):
            value = Path(value)
        elif isinstance(value, list):  # as JSON has tuples
            value = tuple(value)
        kwargs[name] = value
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        if item.default is item.default_factory is dataclasses.MISSING and item.name not in kwargs:
            raise ConfigError(f"{where}{item.name} is missing.")
    return cls(**kwargs)


def flat(settings: Any, prefix: str = "", free_too: bool = True) -> dict[str, Any]:
    """Settings by dotted name, as plain JSON values; without the free ones, if these do not matter."""
    found: dict[str, Any] = {f"{prefix}name": settings.NAME} if hasattr(settings, "NAME") else {}
    for item in dataclasses.fields(settings):
        value, name = getattr(settings, item.name), prefix + item.name
        if item.metadata.get("free") and not free_too:
            continue
        if dataclasses.is_dataclass(value):
            found |= flat(value, f"{name}.", free_too)
        else:
            found[name] = str(value) if isinstance(value, Path) else value
    return found
