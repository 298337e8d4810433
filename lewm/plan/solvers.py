"""Every solver by name."""

from __future__ import annotations

from collections.abc import Callable

from lewm.config import PlanConfig
from lewm.errors import ConfigError
from lewm.plan.cem import CEM
from lewm.plan.gradient import Gradient
from lewm.plan.icem import ICEM
from lewm.plan.mppi import MPPI
from lewm.plan.solver import Solver


def make_solver(config: PlanConfig) -> Solver:
    """The solver that ``config.solver`` names, with its settings."""
    if config.icem.recorded and config.solver != "icem":  # not in the config, where `lewm eval --solver` sets it last
        got = f"{config.icem.recorded} with {config.solver}"
        raise ConfigError(f"plan.icem.recorded is for the solver icem, got {got}.")
    if config.solver in ("sgd", "rmsprop", "adam"):
        return Gradient(config)
    sampling: dict[str, Callable[[PlanConfig], Solver]] = {"cem": CEM, "icem": ICEM, "mppi": MPPI}
    return sampling[config.solver](config)
