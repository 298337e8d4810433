"""What was best for the trained model of each environment, on pairs to choose settings on (docs/notebook/search.md).

The paper's own planning is the default everywhere else, because figures are compared by it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lewm.config import IcemConfig, PlanConfig
from lewm.errors import ConfigError

_BOUNDED: dict[str, Any] = {"solver": "icem", "schedule": "shrinking", "warm_start": True, "action_limit": 1.0}
TUNED: dict[str, dict[str, Any]] = {
    "tworoom": {**_BOUNDED, "icem": IcemConfig(noise_exponent=1.0)},
    "pusht": {**_BOUNDED, "icem": IcemConfig(noise_exponent=0.5)},
    "reacher": {"solver": "icem", "schedule": "shrinking", "icem": IcemConfig(noise_exponent=2.0)},
    "cube": {**_BOUNDED, "icem": IcemConfig(recorded=3, momentum=0.3)},
}


def tuned_plan(env: str, plan: PlanConfig | None = None) -> PlanConfig:
    """``plan`` (None: the paper's) with the settings that were best in the environment of this short name."""
    if env not in TUNED:
        raise ConfigError(
            f"Plans have been tuned for {', '.join(TUNED)}, not for {env!r}. Choose settings yourself, as "
            "docs/guide/compare.md says."
        )
    return replace(plan or PlanConfig(), **TUNED[env])
