"""Files that hold a model: safetensors weights beside a JSON description. Never pickled, never half-written.

    DIR/model.safetensors      the weights, in float32 or, after `lewm export`, in bf16
    DIR/config.json            format version, method, what it knows of its data, SHA-256 of the other files
    DIR/actions.safetensors    action sequences of the training data, for planners to try; older models have none
    DIR/optimizer.safetensors  of a run's checkpoints: what it takes to continue

They appear under their names once they are complete on disk. One digest in config.json is over all of it, so that a
damaged file, or one of another model, is noticed before it is used. Some such folders come with lewm and have names:
``pretrained_models``.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save

from lewm.errors import CheckpointError, FileError, unknown_name
from lewm.files import (
    clear_leftovers,
    disk_errors,
    file_digest,
    json_digest,
    read_json,
    remove,
    replacing,
    sync,
    sync_entry,
    temporary_name,
)
from lewm.retired import current
from lewm.version import __version__

FORMAT_VERSION = 2  # 1: LeWM only, its architecture under "model", no digest over everything
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
ACTIONS = "actions.safetensors"
OPTIMIZER = "optimizer.safetensors"
STEP = re.compile(r"step_(\d+)")  # what a run's checkpoints are called
# Where models that have names are: inside an installed package, beside the package in a checkout.
PRETRAINED = (Path(__file__).parent / "pretrained", Path(__file__).parents[1] / "pretrained")

Tensors = Mapping[str, torch.Tensor]

# -- one model -----------------------------------------------------------------------------------------------------


def save_model(
    directory: Path, files: Mapping[str, Tensors], description: dict[str, Any], texts: Mapping[str, str] | None = None
) -> Path:
    """Write safetensors files by name, their description, and further ``texts`` by file name.

    An interruption or a full disk leaves what was there before.
    """
    texts = texts or {}
    # The description last: until it takes its name, the one that is there tells that the others are not its own.
    names = [*files, *texts, CONFIG]
    with replacing(*(directory / name for name in names)) as temporaries:
        places = dict(zip(names, temporaries, strict=True))
        for name, tensors in files.items():
            write_tensors(places[name], tensors)
        for name, text in texts.items():
            places[name].write_text(text, encoding="utf-8")
        digests = {name: file_digest(places[name]) for name in files}
        places[CONFIG].write_text(_described(description, digests), encoding="utf-8")
    return directory


def _described(description: dict[str, Any], digests: dict[str, str]) -> str:
    """The text of config.json; its header comes first, and is not to be contradicted."""
    header: dict[str, Any] = {"format": "lewm", "format_version": FORMAT_VERSION, "lewm_version": __version__}
    header |= {"digest": "", "files": digests}
    document = header | {"run": {}} | description | header
    document["digest"] = _digest(document)
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def _digest(document: dict[str, Any]) -> str:
    """SHA-256 over all that a description says, and so over the files whose digests are in it."""
    return json_digest({name: value for name, value in document.items() if name != "digest"})


def load_document(directory: Path) -> dict[str, Any]:
    """A checkpoint's config.json as this version writes it, after checking that it is whole."""
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
    if version < 2:
        document = _from_version_1(document, path)
    elif document.get("digest") != _digest(document):
        raise CheckpointError(f"{path} is not what was written (its SHA-256 differs). Copy the model again.")
    section(document, "files", directory)
    return document


def section(document: dict[str, Any], name: str, directory: Path) -> dict[str, Any]:
    """A part of the description of the model in ``directory``, which must be an object."""
    found = document.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"{directory / CONFIG} needs a section {name!r}, an object; it has {found!r}.")
    return found


def _from_version_1(document: dict[str, Any], path: Path) -> dict[str, Any]:
    """What lewm 0.1 wrote, as this version says it."""
    run, data, training = (document.get(name) or {} for name in ("run", "data", "training"))
    sigreg = run.get("sigreg", {}) if isinstance(run, dict) else None
    if not all(isinstance(section, dict) for section in (document.get("model"), run, data, training, sigreg)):
        raise CheckpointError(f"{path} has no 'model' section, or others are no objects: this is no lewm checkpoint.")
    settings = current({"model": document["model"], "sigreg": sigreg}, lost=[])
    environment = document.get("environment") or training.get("env") or run.get("env")
    facts = {
        "actions": document.get("action_stats"),
        "environment": environment,
        "dataset": None,
        "episodes": data.get("episodes"),
        "encoder": None,
    }
    digests = {WEIGHTS: document.get("weights_sha256"), ACTIONS: document.get("actions_sha256")}
    return {
        **document,
        **{"run": run, "data": data or None, "training": training or None},
        "method": settings["method"],
        "facts": facts,
        "files": {name: digest for name, digest in digests.items() if digest is not None},
    }


def load_tensors(directory: Path, document: dict[str, Any], name: str = WEIGHTS) -> dict[str, torch.Tensor]:
    """One of a model's files, which must be the one that its description knows."""
    path, expected = directory / name, document["files"].get(name)
    tensors = read_tensors(path)
    # Nothing is said of the weights of version 1 that were exported by hand, or of its optimiser states.
    if expected is None and document["format_version"] >= 2:
        raise CheckpointError(f"{directory / CONFIG} does not know {name}. Copy both from one place.")
    if expected not in (None, file_digest(path)):
        raise CheckpointError(f"{path} does not belong to its {CONFIG} (SHA-256 differs). Copy both from one place.")
    return tensors


def check_tensors(tensors: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], source: Path) -> None:
    """Raise unless both mappings have the same names, shapes and kinds of numbers, all of them finite.

    bf16 may stand for float32.
    """
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
        raise CheckpointError(f"The weights in {source} do not fit the model they describe: {_shortened(problems)}.")
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        what = f"The weights in {source} are not all finite numbers: {_shortened(broken)}"
        raise CheckpointError(f"{what}. Train the model again, or take an earlier checkpoint.")


def _shortened(items: list[str]) -> str:
    return "; ".join(items[:5]) + (f"; and {len(items) - 5} more" if len(items) > 5 else "")


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
    return from_hub(str(source), [WEIGHTS, CONFIG, ACTIONS])


def from_hub(source: str, files: list[str]) -> Path:
    """The folder with a Hugging Face repository's files of these names or patterns, fetched if need be."""
    if Path(source).is_absolute() or source.count("/") != 1 or source.startswith("."):
        raise CheckpointError(f"No model at {source}: no such folder.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(source, allow_patterns=files))
    # Refused names, the hub's answers and its HTTP library's failures share no base class across versions.
    except Exception as error:
        problem = f"{source!r} is not a folder here, and could not be fetched as a Hugging Face repository"
        raise CheckpointError(f"{problem}: {' '.join(str(error).split())}") from error


def _named(name: str) -> Path:
    known = pretrained_models()
    if name in known:
        return known[name]
    problem = unknown_name("model", name, known) if known else f"Unknown model {name!r}: none comes with this lewm."
    raise CheckpointError(f"{problem} Nor is there a folder of that name.")


# -- a run's checkpoints -------------------------------------------------------------------------------------------


def step_of(folder: Path) -> int | None:
    """The step of a checkpoint that has this name; None: it is not one of a run's."""
    match = STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def of_run(directory: Path) -> list[Path]:
    """The checkpoints that a run has in ``directory``, oldest first."""
    folders = directory.iterdir() if directory.is_dir() else ()
    steps = {folder: step for folder in folders if (step := step_of(folder)) is not None and _is_ours(folder)}
    return sorted(steps, key=steps.__getitem__)


def _is_ours(folder: Path) -> bool:
    """Whether lewm wrote a folder of this name: a damaged description counts, one of something else does not."""
    path = folder / CONFIG
    with contextlib.suppress(OSError):  # what cannot be read is not called ours
        return (path.is_file() and b'"format": "lewm"' in path.read_bytes()[:1000]) or (folder / OPTIMIZER).is_file()
    return False


def latest(directory: Path) -> Path | None:
    """The newest of a run's checkpoints."""
    return next(reversed(of_run(directory)), None)


def newest_whole(directory: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a run that verifies, and what is wrong with those that are newer."""
    problems: list[str] = []
    for folder in reversed(of_run(directory)):
        try:
            document = load_document(folder)
            for name in dict.fromkeys((WEIGHTS, OPTIMIZER, *document["files"])):
                tensors = load_tensors(folder, document, name)
                _check_exact(tensors if name == WEIGHTS else {}, folder)
            return folder, problems
        except (CheckpointError, FileError) as error:
            problems.append(str(error))
    return None, problems


def _check_exact(weights: Tensors, folder: Path) -> None:
    """Refuse what `lewm export` rounded, from which no run continues as it would have."""
    if any(tensor.dtype == torch.bfloat16 for tensor in weights.values()):
        problem = f"{folder} has weights in bf16, as an exported model has"
        raise CheckpointError(f"{problem}. A run continues from the float32 ones of its own checkpoints.")


def write_folder(target: Path, fill: Callable[[Path], object]) -> None:
    """Make ``target`` appear with everything ``fill`` writes into it, or not at all.

    What has the name already is moved aside first, and goes when the new one is there: there is always a whole one.
    """
    temporary, aside = temporary_name(target), target.with_name(f"{ASIDE}{target.name}")
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(target)
        try:
            temporary.mkdir()
            fill(temporary)
            sync(temporary)
            if target.exists():
                if aside.exists():
                    _give_up(aside, target)
                target.rename(aside)
            temporary.rename(target)
        finally:
            remove(temporary)
        sync_entry(target.parent)
    with contextlib.suppress(OSError):  # it stays aside
        _give_up(aside, target)


ASIDE = ".before_"  # prefix of what has been moved aside


def recover(directory: Path) -> None:
    """Put back what a killed ``write_folder`` has moved aside, if nothing has its place now, and clear up after it."""
    for aside in directory.glob(f"{ASIDE}*"):
        place = aside.with_name(aside.name.removeprefix(ASIDE))
        with contextlib.suppress(OSError):
            if place.exists():
                _give_up(aside, place)
            else:
                aside.rename(place)
    for leftover in directory.glob(".step_*.tmp"):
        if leftover.is_symlink():
            remove(leftover)
            continue
        with contextlib.suppress(OSError):
            _give_up(leftover, directory / leftover.name.split(".")[1])


def prune(directory: Path, keep: int, newest: int) -> list[str]:
    """Remove all but ``keep`` checkpoints up to step ``newest``, which was just saved; returns what could not be.

    Later ones do not count: they are damaged, or the run would have continued from them.
    """
    problems = []
    for old in [folder for folder in of_run(directory) if (step_of(folder) or 0) <= newest][:-keep]:
        gone = temporary_name(old)
        try:
            old.rename(gone)  # at once: a checkpoint is there, or it is not
            _give_up(gone, old)
        except OSError as error:
            problems.append(f"The old checkpoint {old} could not be removed ({error}).")
    return problems


def _give_up(folder: Path, heir: Path) -> None:
    """Remove a checkpoint's folder and what lewm wrote into it; whatever else is there moves to the folder ``heir``."""
    if folder.is_symlink():
        raise OSError(f"{folder} is a link; what it leads to stays")
    own = _own_names(folder)
    for item in list(folder.iterdir()):
        if item.name in own or (item.name.startswith(".") and item.name.endswith(".tmp")):
            item.unlink()
        else:
            heir.mkdir(exist_ok=True)
            if (heir / item.name).exists():
                raise OSError(f"{item} is not lewm's, and {heir} has something of this name")
            item.rename(heir / item.name)
    folder.rmdir()


def _own_names(folder: Path) -> set[str]:
    """What lewm wrote into a checkpoint's folder."""
    names = {WEIGHTS, CONFIG, ACTIONS, OPTIMIZER}
    with contextlib.suppress(FileError, KeyError, AttributeError, TypeError):
        names |= {name for name in read_json(folder / CONFIG)["files"] if name.endswith(".safetensors")}
    return names


# -- tensors -------------------------------------------------------------------------------------------------------


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a safetensors file; it is for ``write_folder`` or ``replacing`` to make it appear whole."""
    # Not by save_file: killed, it leaves a file beside it whose name nobody knows.
    path.write_bytes(save(_plain(tensors)))


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
