"""Devices that cannot be used are refused by name."""

import pytest
import torch

from lewm.errors import ConfigError
from lewm.model.device import resolve_device


def test_auto_finds_a_device_and_a_named_one_is_taken():
    assert resolve_device("auto").type in ("cuda", "mps", "cpu")
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cdua", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name: str):
    with pytest.raises(ConfigError, match=name):
        resolve_device(name)
