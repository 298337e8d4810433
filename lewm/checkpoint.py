"""Files that hold a model: safetensors weights beside a JSON description. Never pickled, never half-written.

    DIR/model.safetensors    the weights, in float32 or, after `lewm export`, in bf16
    DIR/config.json          format version, architecture, action statistics, SHA-256 of the other files
    DIR/actions.safetensors  action sequences of the training data, for planners to try; older models have none

They appear under their names once they are complete on disk; hashes tell files of two models apart. Some such folders
come with lewm and have names: ``pretrained_models``.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save, save_file

from lewm.errors import CheckpointError, unknown_name
from lewm.files import completing, file_digest, read_json, replacing
from lewm.version import __version__

FORMAT_VERSION = 1
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
ACTIONS = "actions.safetensors"
# Where models that have names are: inside an installed package, beside the package in a checkout.
PRETRAINED = (Path(__file__).parent / "pretrained", Path(__file__).parents[1] / "pretrained")


def save_model(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor],
    description: dict[str, Any],
    texts: Mapping[str, str] | None = None,
    actions: torch.Tensor | None = None,
) -> Path:
    """Write weights, their description, further ``texts`` by file name, and recorded ``actions`` (N, T, action_dim).

    An interruption or a full disk leaves what was there before.
    """
    directory, texts = Path(directory), texts or {}
    names = [WEIGHTS, CONFIG, *texts] if actions is None else [WEIGHTS, CONFIG, *texts, ACTIONS]
    with replacing(*(directory / name for name in names)) as temporaries:
        files = dict(zip(names, temporaries, strict=True))
        write_tensors(files[WEIGHTS], tensors)
        header: dict[str, Any] = {"format": "lewm", "format_version": FORMAT_VERSION, "lewm_version": __version__}
        header |= {"weights_sha256": file_digest(files[WEIGHTS]), "actions_sha256": None}
        if actions is not None:
            write_tensors(files[ACTIONS], {"sequences": actions})
            header["actions_sha256"] = file_digest(files[ACTIONS])
        for name, text in texts.items():
            files[name].write_text(text, encoding="utf-8")
        document = header | description | header  # first in the file, and not to be contradicted
        files[CONFIG].write_text(json.dumps(document, indent=2) + "\n")
    return directory


def load_model(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors and the description that ``save_model`` wrote, checked against one another."""
    document = load_document(directory)
    path = directory / WEIGHTS
    tensors = read_tensors(path)
    if document.get("weights_sha256") not in (None, file_digest(path)):
        raise CheckpointError(f"{path} does not belong to its {CONFIG} (SHA-256 differs). Copy both from one place.")
    return tensors, document


def load_actions(directory: Path, document: dict[str, Any]) -> torch.Tensor | None:
    """The recorded actions of a model with this description, float32 (N, T, action_dim); None if it has none."""
    expected, path = document.get("actions_sha256"), directory / ACTIONS
    if expected is None:
        return None
    tensors = read_tensors(path)
    if expected != file_digest(path) or set(tensors) != {"sequences"}:
        raise CheckpointError(f"{path} does not belong to its {CONFIG} (SHA-256 differs). Copy both from one place.")
    return tensors["sequences"]


def load_document(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json, after checking that this version of lewm can read it."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no {CONFIG}: expected a folder written by lewm.")
    document = read_json(path)
    version = document.get("format_version") if isinstance(document, dict) else None
    if not isinstance(version, int) or document.get("format") != "lewm":
        raise CheckpointError(f"{path} does not describe a lewm model; the authors' need `lewm import-official` first.")
    if version > FORMAT_VERSION:
        writer = f"lewm {document.get('lewm_version')} in format {version}"
        raise CheckpointError(f"{directory} was written by {writer}, unknown here. Run `pip install --upgrade lewm`.")
    return document


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], source: Path) -> None:
    """Raise unless both mappings have the same names, shapes and kinds of numbers; bf16 may stand for float32."""
    problems = [f"missing {name}" for name in expected if name not in tensors]
    problems += [f"unexpected {name}" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in tensors and tensors[name].shape != expected[name].shape
    ]
    problems += [
        f"{name} has numbers of type {tensors[name].dtype} instead of {expected[name].dtype}"
        for name in expected
        if name in tensors and tensors[name].dtype not in _dtypes_for(expected[name].dtype)
    ]
    if problems:
        shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
        raise CheckpointError(f"The weights in {source} do not fit the model they describe: {shown}.")


def _dtypes_for(dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """What a file may hold for a tensor of a given type."""
    return (torch.float32, torch.bfloat16) if dtype == torch.float32 else (dtype,)


def pretrained_models() -> dict[str, Path]:
    """The folders of the models that come with lewm, by name."""
    found = [path.parent for folder in PRETRAINED for path in folder.glob(f"*/{CONFIG}")]
    return {folder.name: folder for folder in sorted(found) if (folder / WEIGHTS).is_file()}


def resolve(source: str | Path) -> Path:
    """The folder with a model's files.

    ``source`` is such a folder, a run's (its newest checkpoint), the name of a model that comes with lewm, or a
    Hugging Face repository. A folder that exists is preferred to a name.
    """
    path = Path(source)
    if (path / CONFIG).is_file() and (path / WEIGHTS).is_file():
        return path
    if path.is_dir():
        newest = latest(path / "checkpoints")
        if newest is None:
            raise CheckpointError(f"{path} holds neither {WEIGHTS} and {CONFIG} nor a run's checkpoints.")
        return newest
    if len(path.parts) == 1 and path.name and not path.name.startswith("."):
        return _named(path.name)
    if path.is_absolute() or str(source).count("/") != 1 or str(source).startswith("."):
        raise CheckpointError(f"No model at {path}: no such folder.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(source), allow_patterns=[WEIGHTS, CONFIG, ACTIONS]))
    # Refused names, the hub's answers and its HTTP library's failures share no base class across versions.
    except Exception as error:
        problem = f"{str(source)!r} is not a folder here, and could not be fetched as a Hugging Face repository"
        raise CheckpointError(f"{problem}: {error}") from error


def _named(name: str) -> Path:
    known = pretrained_models()
    if name in known:
        return known[name]
    problem = unknown_name("model", name, known) if known else f"Unknown model {name!r}: none comes with this lewm."
    raise CheckpointError(f"{problem} Nor is there a folder of that name.")


def latest(directory: Path) -> Path | None:
    """The newest of a run's checkpoints: a folder for each step in ``directory``, complete or absent."""
    return max(directory.glob("step_*"), default=None)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Make ``target`` appear with everything ``fill`` writes into it, or not at all."""
    with completing(target) as temporary:
        temporary.mkdir()
        fill(temporary)
        if target.exists():
            shutil.rmtree(target)


def prune(directory: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest checkpoints."""
    for old in sorted(directory.glob("step_*"))[:-keep]:
        shutil.rmtree(old)


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file; it is for ``write_folder`` or ``replacing`` to make it appear whole."""
    path.touch()
    mode = path.stat().st_mode  # what the user's files get; save_file makes one that only its owner may read
    try:
        save_file(_plain(tensors), path)
    except SafetensorError as error:  # as a full disk shows itself
        raise OSError(str(error)) from error
    path.chmod(mode)


def _plain(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def weights_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The SHA-256 that the file of these tensors will have."""
    return hashlib.sha256(save(_plain(tensors))).hexdigest()


def weights_precision(directory: Path) -> str:
    """How a model's folder holds its weights: "float32", or "bf16" if any of them is."""
    with safe_open(directory / WEIGHTS, "pt") as file:
        kinds = {file.get_slice(name).get_dtype() for name in sorted(file.keys())}
        return "bf16" if "BF16" in kinds else "float32"


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a safetensors file onto the CPU."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged or incomplete: {error}. Copy or train it again.") from error
