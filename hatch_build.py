"""Wheels carry the models of ``pretrained/``, where there are any, inside the package."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PretrainedModels(BuildHookInterface):
    """An editable install finds them in the checkout; a wheel for everyone else needs copies."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / "pretrained"
        if version == "standard" and folder.is_dir():
            build_data["force_include"][str(folder)] = "lewm/pretrained"
