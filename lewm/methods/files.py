"""Models of any method as files, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lewm import checkpoint
from lewm.checked import to_dict
from lewm.config import Config
from lewm.errors import CheckpointError
from lewm.files import json_digest
from lewm.methods.base import Method
from lewm.methods.registry import read_settings
from lewm.model.device import resolve_device
from lewm.presets import read_config
from lewm.types import ActionStats, DataFacts


def load(source: str | Path, device: str | torch.device = "auto") -> Method:
    """Load a model of any method, in evaluation mode and float32.

    source: a folder, a run's folder, the name of a model that comes with lewm ("pusht"), or a Hugging Face
    repository id. Loading is strict: missing, extra or misshapen tensors and damaged files are errors.
    """
    directory = checkpoint.resolve(source)
    document = checkpoint.load_document(directory)
    method = from_document(document, directory)
    tensors = checkpoint.load_tensors(directory, document)
    checkpoint.check_tensors(tensors, method.own_state(), directory)
    method.load_own_state(tensors)
    return method.to(resolve_device(device)).eval()


def from_document(document: dict[str, Any], directory: Path) -> Method:
    """An untrained model of the method, architecture and facts that a description says; ``directory`` is its folder."""
    recorded = None
    if checkpoint.ACTIONS in document["files"]:
        recorded = checkpoint.load_tensors(directory, document, checkpoint.ACTIONS).get("sequences")
    try:
        facts = _facts(document["facts"], recorded)
    except (KeyError, TypeError) as error:
        place = directory / checkpoint.CONFIG
        raise CheckpointError(f"{place} has no proper facts ({error}). Copy it again.") from error
    return read_settings(document["method"]).build(facts)


def save(
    method: Method, directory: Path, extra: dict[str, Any] | None = None, optimizer: checkpoint.Tensors | None = None
) -> Path:
    """Write weights, settings, facts and recorded actions; ``extra`` joins config.json. optimizer: its state."""
    files: dict[str, checkpoint.Tensors] = {checkpoint.WEIGHTS: method.own_state()} | recorded_file(method)
    if optimizer is not None:
        files[checkpoint.OPTIMIZER] = optimizer
    return checkpoint.save_model(directory, files, describe(method) | (extra or {}))


def recorded_file(method: Method) -> dict[str, checkpoint.Tensors]:
    """The file of its recorded actions, if it has any."""
    return {} if method.recorded_actions is None else {checkpoint.ACTIONS: {"sequences": method.recorded_actions}}


def describe(method: Method) -> dict[str, Any]:
    """What config.json says of a model, besides its files."""
    facts, stats = method.facts, method.facts.actions
    return {
        "method": to_dict(method.settings),
        "facts": {
            "actions": stats and {"mean": list(stats.mean), "std": list(stats.std)},
            "environment": facts.environment,
            "dataset": facts.digest,
            "episodes": facts.episodes,
            "encoder": facts.encoder,
        },
    }


def identity(method: Method) -> str:
    """One digest over all that makes a model what it is: method, settings, facts, weights, recorded actions."""
    tensors = {checkpoint.WEIGHTS: method.own_state()} | recorded_file(method)
    return json_digest(describe(method) | {name: checkpoint.weights_digest(t) for name, t in tensors.items()})


def run_settings(document: dict[str, Any], lost: list[str] | None = None) -> Config:
    """The settings of the run that a description is of; the usual ones for its method if it is of none."""
    return read_config({**document.get("run", {}), "method": document["method"]}, lost)


def _facts(values: dict[str, Any], recorded: torch.Tensor | None) -> DataFacts:
    stats = values["actions"]
    return DataFacts(
        actions=stats and ActionStats(tuple(stats["mean"]), tuple(stats["std"])),
        recorded=recorded,
        digest=values["dataset"],
        episodes=values["episodes"],
        environment=values["environment"],
        encoder=values["encoder"],
    )
