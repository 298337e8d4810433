"""Which device is taken, and that one that cannot be used is refused by name."""

from __future__ import annotations

import pytest
import torch

from lewm.errors import ConfigError
from lewm.model.device import resolve_device


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda"), (True, False, "cuda"), (False, True, "mps"), (False, False, "cpu")],
)
def test_auto_takes_the_fastest_that_is_there(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert resolve_device("auto") == torch.device(expected)


def test_a_named_one_is_taken():
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["cdua", "cuda:99", "mps:7"])
def test_a_device_that_is_not_there_is_refused(name: str):
    with pytest.raises(ConfigError, match=name):
        resolve_device(name)
