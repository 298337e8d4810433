"""One byte that changed, anywhere in a file that lewm wrote: it is noticed, or it makes no difference.

Every reading is in a process of its own kind, which notes what it is about to read: so it is seen which byte has killed
it, or has kept it busy for ever.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import random
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from lewm import checkpoint, cli
from lewm.config import Config
from lewm.data.features import Features, build_features
from lewm.data.store import EpisodeStore
from lewm.errors import LewmError
from lewm.evaluate.comparison_files import read_entry
from lewm.evaluate.comparison_tables import Table
from lewm.evaluate.journal import Journal, Note
from lewm.evaluate.results import read_rates
from lewm.export.card import Evaluated
from lewm.methods.files import identity, load, run_settings
from lewm.train.run import Run
from lewm.types import Plan
from lewm.understand.decoder import DecoderSettings, load_decoder, train_decoder
from lewm.understand.findings import Findings, read_findings, write_findings
from lewm.understand.monitor_calibration import Calibration, calibrated
from lewm.understand.subject import open_subject
from lewm.understand.surprise_rows import Row, RowJournal

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "lewm.evaluate.results", "lewm.export.card", "lewm.train.loop", __name__])
SECONDS = 20  # in which a file is read
MEMORY = 16 << 30  # bytes that a process may ask for
QUESTION = {"model": "of the test", "seed": 1}
HARMLESS, REFUSED, OTHER, UNCAUGHT, KILLED = "harmless", "refused", "other content", "uncaught", "killed"


def plain(value: Any) -> Any:
    """Something that can be compared, of whatever a reader gives."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().contiguous()
        return str(value.dtype), tuple(value.shape), value.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return repr(value) if isinstance(value, float) else value


# -- what is read, and by whom ----------------------------------------------------------------------------------------


def dataset(folder: Path) -> Any:
    with EpisodeStore(folder / "d.h5") as store:
        columns = {name: store.read_column(name) for name in store.columns}
        frames = store.read_frames(store.frame_rows)
        return store.attributes, columns, frames, store.lengths, store.frame_rows, store.actions


def brightness(frames: torch.Tensor) -> torch.Tensor:
    """What stands for a frozen encoder."""
    return frames.float().mean((1, 2))


def features(folder: Path) -> Any:
    with EpisodeStore(folder / "d.h5") as store:
        build_features(store, "brightness", "0" * 64, brightness, batch=64)
        with Features(store, "brightness", "0" * 64) as found:
            return found.gather(store.frame_rows[:, None])


def model(folder: Path) -> Any:
    place = folder / "run/checkpoints/step_0000008"
    method, document = load(place, "cpu"), checkpoint.load_document(place)
    return identity(method), document, run_settings(document, place, [])


def run_to_continue(folder: Path) -> Any:
    """What a training goes on from: a damaged checkpoint is named, and passed over."""
    newest, problems = checkpoint.newest_whole(folder / "run/checkpoints")
    if problems:
        raise LewmError(problems[0])
    assert newest is not None
    saved = Run.read(newest)
    return saved.weights, saved.moments, saved.progress, saved.facts


def results(folder: Path) -> Any:
    path = folder / "results.json"
    weights = json.loads((folder / "weights.json").read_text())
    return read_rates(path), read_entry(path), Evaluated.read(path, weights)


def notes(folder: Path) -> Any:
    return Journal(folder / "results.json.partial", QUESTION).by_place


def findings(folder: Path) -> Any:
    found = read_findings(folder, "probe")
    if found is None:
        raise LewmError("It is found again.")
    return found


def rows(folder: Path) -> Any:
    found = RowJournal(folder / "rows.csv", 2)
    return {episode: found.of(episode) for episode in range(20) if found.of(episode) is not None}


def decoder(folder: Path) -> Any:
    subject = open_subject(folder / "run/checkpoints/step_0000008", "cpu")
    drawer = load_decoder(folder / "decoder.safetensors", subject)
    return drawer.about, drawer.decoder.state_dict()


def calibration(folder: Path) -> Any:
    return Calibration.load(folder / "calibration.json")


@dataclass(frozen=True)
class File:
    """A file, and who reads it. flips: of the 2,000.  column: a part of it.  partly: some of its content may go."""

    path: str
    read: Callable[[Path], Any]
    flips: int
    column: str | None = None
    partly: bool = False


STEP = "run/checkpoints/step_0000008"
FEATURES = f"d.h5.features/brightness-{'0' * 16}"
FILES = {
    **{f"column {name}": File("d.h5", dataset, 100, name) for name in ("pixels", "state", "action", "success")},
    "rest of a dataset": File("d.h5", dataset, 250, "rest"),
    "features": File(f"{FEATURES}/features.npy", features, 100),
    "form of features": File(f"{FEATURES}/features.json", features, 50),
    "checksums of features": File(f"{FEATURES}/checksums.txt", features, 50),
    "weights": File(f"{STEP}/model.safetensors", model, 150),
    "actions": File(f"{STEP}/actions.safetensors", model, 50),
    "configuration": File(f"{STEP}/config.json", model, 150),
    "optimiser": File(f"{STEP}/optimizer.safetensors", run_to_continue, 150),
    "results": File("results.json", results, 250),
    "notes": File("results.json.partial", notes, 150, partly=True),
    "findings": File("probe.json", findings, 100),
    "rows": File("rows.csv", rows, 50, partly=True),
    "decoder": File("decoder.safetensors", decoder, 50),
    "calibration": File("calibration.json", calibration, 50),
}


@pytest.fixture(scope="module")
def whole(debug_config: Config, debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of these files, as lewm writes them."""
    folder = tmp_path_factory.mktemp("whole")
    assert debug_config.data is not None
    shutil.copy(debug_config.data, folder / "d.h5")
    shutil.copytree(debug_run, folder / "run")
    place, before = folder / STEP, signal.getsignal(signal.SIGTERM)
    assert cli.run(["eval", str(place), "--device", "cpu", "--out", str(folder / "results.json")]) == 0
    signal.signal(signal.SIGTERM, before)
    weights = checkpoint.load_document(place)["files"][checkpoint.WEIGHTS]
    (folder / "weights.json").write_text(json.dumps(weights))
    rng = np.random.default_rng(0)
    with contextlib.closing(Journal(folder / "results.json.partial", QUESTION)) as journal:
        for index in range(8):
            plan = Plan(rng.random((4, 2), np.float32), float(rng.random()), rng.random(2, np.float32))
            journal.add({(index, 0): Note(plan, 0.5)})
    (folder / "a.csv").write_text("1\n")
    table = Table("Probes", ("quantity", "MSE"), (("agent x", "0.25"), ("agent y", "0.5")))
    question = {"verb": "probe", "model": "a", "dataset": "b", "settings": {"seed": 0}}
    numbers = {"mse": rng.random(10).tolist()}
    write_findings(folder, Findings("probe", "Probes", question, (table,), ("Low is good.",), numbers, {"a.csv": "A."}))
    with RowJournal(folder / "rows.csv", 2) as journal_of_rows:
        for episode in range(5):
            kept = [Row(episode, 3, "colour", "colour", n, n, float(rng.random()), 0.5) for n in range(2)]
            journal_of_rows.add(episode, kept)
    with EpisodeStore(folder / "d.h5") as store:
        train_decoder(
            open_subject(place, "cpu"),
            store,
            DecoderSettings(steps=2, batch_size=4, width=8),
            folder / "decoder.safetensors",
        )
    calibrated([rng.random(20) for _ in range(20)], "model", 1, 0.1).save(folder / "calibration.json")
    shutil.rmtree(folder / "d.h5.features", ignore_errors=True)
    features(folder)
    return folder


# -- flipping ----------------------------------------------------------------------------------------------------------


def places(file: File, folder: Path) -> Sequence[int]:
    """Bytes of a file that may change."""
    path = folder / file.path
    if file.column is None:
        return range(path.stat().st_size)
    spans = dict(columns(path))
    if file.column != "rest":
        return [place for span in spans[file.column] for place in span]
    known = np.zeros(path.stat().st_size, bool)
    for span in (span for each in spans.values() for span in each):
        known[span.start : span.stop] = True
    return np.flatnonzero(~known).tolist()


def columns(path: Path) -> Iterator[tuple[str, list[range]]]:
    """Where in a dataset's file the numbers of each column are."""
    with h5py.File(path) as opened:
        for name, column in opened.items():
            chunks = [column.id.get_chunk_info(n) for n in range(column.id.get_num_chunks())] if column.chunks else []
            starts = [(chunk.byte_offset, chunk.size) for chunk in chunks] or [(column.id.get_offset(), column.nbytes)]
            yield name, [range(start, start + size) for start, size in starts]


def fits(found: Any, calm: Any, partly: bool) -> bool:
    """Whether what was read is what was written, or some of it."""
    return found == calm or (partly and found.items() <= calm.items())


def read_flipped(name: str, folder: Path, flips: Sequence[tuple[int, int]], said: Path) -> None:
    """Read a file again and again, each time with another byte changed, and note what came of it."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    file = FILES[name]
    path = folder / file.path
    whole, calm = path.read_bytes(), plain(file.read(folder))
    with said.open("a") as notes:
        for place, change in flips:
            path.write_bytes(whole[:place] + bytes([whole[place] ^ change]) + whole[place + 1 :])
            signal.alarm(SECONDS)
            try:
                ok = fits(plain(file.read(folder)), calm, file.partly)
                outcome = HARMLESS if ok else OTHER
            except LewmError as error:
                outcome = REFUSED if "\n" not in str(error).strip() else f"{UNCAUGHT} more than a line"
            except Exception as error:
                outcome = f"{UNCAUGHT} {error!r}"
            signal.alarm(0)
            restored(folder, file, whole)
            notes.write(json.dumps([place, change, outcome]) + "\n")
            notes.flush()


def restored(folder: Path, file: File, whole: bytes) -> None:
    """As it was: also where a reader has mended it."""
    (folder / file.path).write_bytes(whole)
    if file.read is features and file.path != f"{FEATURES}/features.npy":
        features(folder)


def flipped(name: str, whole: Path, folder: Path, count: int) -> list[list[Any]]:
    """What came of so many flips: place, change, outcome."""
    file, rng = FILES[name], random.Random(name)
    shutil.copytree(whole, folder)
    known = places(file, folder)
    left = [(rng.choice(known), rng.randrange(1, 256)) for _ in range(count)]
    outcomes, said = list[list[Any]](), folder.with_name(f"{folder.name} said")
    content = (folder / file.path).read_bytes()
    while left:
        said.write_text("")
        process = CONTEXT.Process(target=read_flipped, args=(name, folder, left, said))
        process.start()
        process.join()
        done = [json.loads(line) for line in said.read_text().splitlines()]
        outcomes += done
        left = left[len(done) :]
        if process.exitcode:
            assert process.exitcode < 0, "what is whole can be read"
            outcomes.append([*left.pop(0), f"{KILLED} by {signal.Signals(-process.exitcode).name}"])
        (folder / file.path).write_bytes(content)
    return outcomes


def check(name: str, whole: Path, folder: Path, count: int) -> Counter[str]:
    outcomes = flipped(name, whole, folder, count)
    assert len(outcomes) == count
    bad = [outcome for outcome in outcomes if outcome[2] not in (HARMLESS, REFUSED)]
    assert not bad, f"{len(bad)} of {count}: {bad[:8]}"
    return Counter(outcome[2] for outcome in outcomes)


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_two_thousand_changed_bytes(name: str, whole: Path, tmp_path: Path) -> None:
    assert sum(file.flips for file in FILES.values()) >= 2000
    check(name, whole, tmp_path / "files", FILES[name].flips)


@pytest.mark.parametrize("name", FILES)
def test_a_changed_byte_is_noticed_or_makes_no_difference(name: str, whole: Path, tmp_path: Path) -> None:
    check(name, whole, tmp_path / "files", 4)
