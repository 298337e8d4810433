"""Export a run: a small folder from which anyone can plan, and that says where the model comes from.

    OUT/model.safetensors     weights in bf16, 36 MB at full size
    OUT/config.json           architecture, action statistics, dataset, training, settings, evaluations
    OUT/actions.safetensors   action sequences of the training data, for planners to try
    OUT/README.md             the model card: figures with intervals, and the commands that repeat them

The same run gives the same bytes, so that an evaluation of the exported folder stays valid when the run is exported
again, now with its figures: its file names the SHA-256 of the weights that it measured. What an earlier export of the
same weights knew of dataset and evaluations is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from lewm import checkpoint
from lewm.checked import to_dict
from lewm.config import Config
from lewm.data.record import collect_settings, dataset_record
from lewm.data.store import EpisodeStore
from lewm.errors import FileError
from lewm.export.card import CARD, Evaluated, in_order, model_card
from lewm.export.commands import portable
from lewm.files import check_place, leaving_no_empty_folders, only_writer, read_json
from lewm.methods.files import bf16_tensors, describe, load, recorded_file
from lewm.presets import read_config
from lewm.train.logs import read_metrics

LOCK = ".lock"  # in the folder, while a process exports to it


def export_run(source: str | Path, out: Path, evaluations: Sequence[Path] = ()) -> Path:
    """Write the model of a run (or of any model's folder) to ``out``, with a card that has the evaluations of it.

    evaluations: files that `lewm eval` wrote, of the exported weights: others are refused, and nothing is written. They
        join those of earlier exports of these weights, and take the places of earlier answers to the same question.
    """
    folder = checkpoint.resolve(source)
    document = checkpoint.load_document(folder)
    _check_place(out, folder)
    model = load(folder, device="cpu")
    tensors = bf16_tensors(model)
    digest = checkpoint.weights_digest(tensors)
    new = [Evaluated.read(path, digest) for path in evaluations]
    busy = f"Another process is exporting to {out}. Wait for it."
    with leaving_no_empty_folders(out), only_writer(out / LOCK, busy):
        recorded = document.get("run", {})
        run = read_config(recorded, lost=[])
        earlier = _earlier_export(out, digest)
        entries = (
            entry for known in (_earlier_export(folder, digest), earlier) for entry in known.get("evaluations", ())
        )
        evaluated = in_order((*(Evaluated.remembered(entry, run) for entry in entries), *new))
        data = document.get("data") or _data_record(run, model.facts.digest) or earlier.get("data")
        description: dict[str, Any] = {
            **describe(model),
            **{name: document[name] for name in ("imported_from",) if name in document},
            "training": _training(folder, document),
            "data": data,
            "run": _described(run, data) if recorded else {},
            "evaluations": [evaluation.entry(run) for evaluation in evaluated],
        }
        card = model_card(out.name, description, model)
        return checkpoint.save_model(
            out, {checkpoint.WEIGHTS: tensors} | recorded_file(model), description, {CARD: card}
        )


def _check_place(out: Path, folder: Path) -> None:
    """Refuse a place where the model that is read, a checkpoint or anything but an earlier export would be lost."""
    check_place(out, [folder])
    if not out.exists():
        return
    if not out.is_dir():
        raise FileError(f"{out} is a file, where a folder was to be written. Choose another place.")
    config = out / checkpoint.CONFIG
    if not config.exists() and not (out / checkpoint.WEIGHTS).exists():
        return
    known = read_json(config) if config.is_file() else None
    if not isinstance(known, dict) or "evaluations" not in known or (out / checkpoint.OPTIMIZER).exists():
        raise FileError(f"{out} holds what `lewm export` did not write; it stays as it is. Choose another place.")


def _training(folder: Path, document: dict[str, Any]) -> dict[str, Any] | None:
    """The record of a checkpoint's training with the minutes that its steps took, if its run's measurements say so."""
    training: dict[str, Any] | None = document.get("training")
    if training is None:
        return None
    rows = [row for row in read_metrics(folder.parent.parent / "metrics.jsonl") if "steps_per_second" in row]
    speeds = [row["steps_per_second"] for row in rows if row["step"] <= training["step"]]
    return {**training, "minutes": training["step"] / speeds[-1] / 60} if speeds else training


def _data_record(run: Config, digest: str | None) -> dict[str, Any] | None:
    """What lies at the place of the run's dataset, if it is what the model was trained on: of older runs, which kept
    no record of their own. digest: of that dataset.
    """
    if digest is None or run.data is None or not run.data.is_file():
        return None
    with EpisodeStore(run.data) as store:
        return dataset_record(store) if store.digest == digest else None


def _described(run: Config, data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The run's settings; how its data were collected is what the data say, or is left out."""
    if data is not None:
        return to_dict(portable(replace(run, collect=collect_settings(data, "The model's record of its dataset"))))
    return {name: value for name, value in to_dict(portable(run)).items() if name != "collect"}


def _earlier_export(out: Path, digest: str) -> dict[str, Any]:
    """What an earlier export of the same weights says, made where the dataset and the results were; else nothing."""
    if not (out / checkpoint.CONFIG).is_file():
        return {}
    earlier = checkpoint.load_document(out)
    return earlier if earlier["files"].get(checkpoint.WEIGHTS) == digest else {}
