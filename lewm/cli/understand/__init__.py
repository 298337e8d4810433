"""`lewm understand [VERB] CHECKPOINT`: what a model has understood. Each verb is a file here."""

from __future__ import annotations

import importlib

from lewm.cli.frame import console, print_grid
from lewm.errors import ConfigError, unknown_name

# In the order of a report; a verb's file has the same name, and a function ``run(arguments)``.
VERBS = {
    "probe": "Read physical quantities from frozen embeddings",
    "decode": "Draw what embeddings and imagined futures look like",
    "map": "Show how the latent space lays out a grid of states",
    "imagine": "Compare imagined futures with what happens, and see whether a search exploits the model",
    "straightness": "Show how straight latent paths become over training",
    "landscape": "Measure how far latent distances tell near from far",
    "notice": "Measure how far embeddings move when one thing of the world changes",
    "surprise": "Measure how a model notices what its world cannot do",
    "report": "Everything that fits the world, on one page; also without a verb",
}


def run(arguments: list[str]) -> None:
    """Hand the arguments to the verb that they name; a checkpoint alone asks for the report."""
    first, *rest = arguments or ["--help"]
    if first in ("-h", "--help"):
        console.print("usage: lewm understand \\[VERB] CHECKPOINT \\[options]\n")
        print_grid((f"  [bold]lewm understand {name}[/]", summary) for name, summary in VERBS.items())
        console.print("\n`lewm understand VERB --help` says what a verb takes.")
        return
    if first not in VERBS:
        if rest and not rest[0].startswith("-"):
            raise ConfigError(unknown_name("verb", first, VERBS))
        first, rest = "report", arguments
    importlib.import_module(f"lewm.cli.understand.{first}").run(rest)
