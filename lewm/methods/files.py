"""Models of any method as files, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from lewm import checkpoint
from lewm.checked import Checked, from_dict, to_dict
from lewm.config import Config
from lewm.errors import CheckpointError, ConfigError
from lewm.files import json_digest
from lewm.methods.base import Method
from lewm.methods.registry import read_settings
from lewm.model.device import resolve_device
from lewm.presets import read_config
from lewm.types import ActionStats, DataFacts

LEAST, MOST = 1e-30, 1e30  # of a statistic


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
        recorded = checkpoint.load_tensors(directory, document, checkpoint.ACTIONS).get("sequences", torch.empty(0))
    checkpoint.section(document, "run", directory)
    facts = read_facts(document, directory, recorded)
    with _blaming(directory):
        settings = read_settings(checkpoint.section(document, "method", directory))
        numbers = settings.inputs().action_dim
        if facts.actions and len(facts.actions.mean) != numbers:
            raise ConfigError(f"facts.actions must have {numbers} means, as actions have, got {facts.actions.mean}.")
    _check_recorded(recorded, numbers, directory)
    with _blaming(directory):
        return settings.build(facts)


def _check_recorded(recorded: torch.Tensor | None, numbers: int, directory: Path) -> None:
    """Refuse recorded actions that are no sequences (N, T, action_dim) of finite float32 numbers."""
    if recorded is None:
        return
    fits = recorded.dtype == torch.float32 and recorded.ndim == 3 and recorded.shape[-1] == numbers
    if not (fits and recorded.isfinite().all()):
        wanted = f"finite float32 numbers of shape (sequences, steps, {numbers})"
        found = f"{recorded.dtype} of shape {tuple(recorded.shape)}" if not fits else "some that are not finite"
        file = directory / checkpoint.ACTIONS
        raise CheckpointError(f"{file} must hold {wanted} as 'sequences', got {found}. Copy or export the model again.")


def read_facts(document: dict[str, Any], directory: Path, recorded: torch.Tensor | None = None) -> DataFacts:
    """What a description says that a model learned of its data; ``directory`` is its folder."""
    with _blaming(directory):
        return from_dict(_Facts, checkpoint.section(document, "facts", directory), "facts.").with_recorded(recorded)


@contextlib.contextmanager
def _blaming(directory: Path) -> Iterator[None]:
    """Name the file in which a setting is wrong, or names another model that is not there."""
    try:
        yield
    except (ConfigError, CheckpointError) as error:
        raise CheckpointError(f"{directory / checkpoint.CONFIG}: {error}") from error


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


def bf16_tensors(method: Method) -> dict[str, torch.Tensor]:
    """A model's tensors with its matrices in bf16.

    Vectors (biases, scales, BatchNorm's statistics) keep their float32: they are less than one percent of the file, and
    rounding them as well would double the change of the embeddings (docs/notebook/bf16-weights.md).
    """
    matrices = {name for name, parameter in method.named_parameters() if parameter.ndim > 1}
    return {name: t.bfloat16() if name in matrices else t for name, t in method.own_state().items()}


def describe(method: Method) -> dict[str, Any]:
    """What config.json says of a model, besides its files."""
    facts = method.facts
    # Only where there is some, or models that were described before would have become others.
    sensed = {"proprio": _described(facts.proprio)} if facts.proprio else {}
    return {
        "method": to_dict(method.settings),
        "facts": {
            "actions": facts.actions and _described(facts.actions),
            "environment": facts.environment,
            "dataset": facts.digest,
            "episodes": facts.episodes,
            "encoder": facts.encoder,
            **sensed,
        },
    }


def _described(stats: ActionStats) -> dict[str, list[float]]:
    return {"mean": list(stats.mean), "std": list(stats.std)}


def identity(method: Method) -> str:
    """One digest over all that makes a model what it is: method, settings, facts, weights, recorded actions."""
    tensors = {checkpoint.WEIGHTS: method.own_state()} | recorded_file(method)
    return json_digest(describe(method) | {name: checkpoint.weights_digest(t) for name, t in tensors.items()})


def run_settings(document: dict[str, Any], directory: Path, lost: list[str] | None = None) -> Config:
    """The settings of the run that the model in ``directory`` is of; the usual ones for its method if it is of none."""
    run, method = (checkpoint.section(document, name, directory) for name in ("run", "method"))
    with _blaming(directory):
        return read_config({**run, "method": method}, lost)


@dataclass(frozen=True)
class _Stats(Checked):
    """Statistics in a file."""

    SECTION: ClassVar[str] = "facts.actions"

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        self._require(len(self.mean) == len(self.std) > 0, "std", f"as many numbers as the mean has ({len(self.mean)})")
        # As float32, in which models compute, less would be 0 and more infinite.
        self._require(all(LEAST <= value <= MOST for value in self.std), "std", f"positive, from {LEAST} to {MOST}")
        self._require(all(abs(value) <= MOST for value in self.mean), "mean", f"at most {MOST} in size")


@dataclass(frozen=True)
class _Facts(Checked):
    """What a file says of ``DataFacts``."""

    SECTION: ClassVar[str] = "facts"

    actions: _Stats | None
    environment: str | None
    dataset: str | None
    episodes: int | None
    encoder: str | None
    proprio: _Stats | None = None

    def with_recorded(self, recorded: torch.Tensor | None) -> DataFacts:
        actions, proprio = (ActionStats(s.mean, s.std) if s else None for s in (self.actions, self.proprio))
        return DataFacts(actions, recorded, None, self.dataset, self.episodes, self.environment, self.encoder, proprio)
