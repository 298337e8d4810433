"""`lewm envs`: the environments."""

from __future__ import annotations

from lewm.cli.frame import print_grid, say, wants_help
from lewm.errors import ConfigError


def run(arguments: list[str]) -> None:
    """List them."""
    if wants_help(arguments):
        say("usage: lewm envs")
    elif arguments:
        raise ConfigError(f"usage: lewm envs; it takes no arguments, got {' '.join(arguments)}.")
    from lewm.envs.registry import env_entry, env_names

    entries = [env_entry(name) for name in env_names()]
    print_grid((f"[bold]{e.name}[/]", e.gym_id, f"{e.action_dim} actions", e.description) for e in entries)
