"""What is written is whole wherever its writer is killed, and whoever comes next finishes it and clears up."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lewm
from lewm import checkpoint, cli
from lewm.config import CollectConfig, Config
from lewm.data.collect import collect
from lewm.errors import LewmError
from lewm.evaluate.results import read_rates
from lewm.export.writer import export_run
from lewm.files import read_json, write_json
from lewm.methods import files
from lewm.train.logs import read_metrics

CONTEXT = multiprocessing.get_context("forkserver")  # processes that begin with everything imported
CONTEXT.set_forkserver_preload(["torch", "lewm.cli.eval", "lewm.evaluate.runner", "lewm.train.loop", __name__])
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"}
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
Act = Callable[[Path], object]


def step_folder(run: Path, step: int) -> Path:
    return run / f"step_{step:07d}"


def write_step(run: Path, step: int, content: float) -> None:
    """Save what looks like a run's checkpoint."""
    files = {name: {"x": torch.full((5,), content)} for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)}
    checkpoint.write_folder(step_folder(run, step), lambda folder: checkpoint.save_model(folder, files, {}))


def content(folder: Path) -> float:
    """Of a checkpoint that is whole; anything else is an error."""
    document = checkpoint.load_document(folder)
    values = {
        checkpoint.load_tensors(folder, document, name)["x"][0].item()
        for name in (checkpoint.WEIGHTS, checkpoint.OPTIMIZER)
    }
    (value,) = values
    return value


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """A folder whose template has the checkpoints 1 and 2."""
    write_step(tmp_path / "template", 1, 1.0)
    write_step(tmp_path / "template", 2, 2.0)
    return tmp_path


def save_third(run: Path) -> None:
    write_step(run, 3, 3.0)


def save_second_again(run: Path) -> None:
    write_step(run, 2, 2.5)


def prune_to_one(run: Path) -> None:
    assert checkpoint.prune(run, keep=1, newest=2) == []


def die_at(number: int, act: Act, folder: Path) -> None:
    """Do something in a folder, and be killed before the change with this number in what is there."""
    changes = itertools.count()

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            is_change = str(path).startswith(str(folder)) and flags & WRITING
        else:
            is_change = event in CHANGES
        if is_change and next(changes) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    torch.set_num_threads(1)
    sys.addaudithook(count)
    act(folder)


def killed_everywhere(act: Act, folder: Path) -> Iterator[Path]:
    """Copies of folder/template in which a process did something, killed at another moment in each."""
    (folder / "template").mkdir(exist_ok=True)
    for number in itertools.count():
        run = Path(shutil.copytree(folder / "template", folder / f"killed at {number}"))
        process = CONTEXT.Process(target=die_at, args=(number, act, run))
        process.start()
        process.join()
        if process.exitcode == 0:  # it was done before
            assert number >= 2
            return
        assert process.exitcode == -signal.SIGKILL
        yield run


def test_a_checkpoint_is_there_or_not_wherever_its_writer_is_killed(two_steps: Path) -> None:
    seen = set()
    for run in killed_everywhere(save_third, two_steps):
        newest, problems = checkpoint.newest_whole(run)
        assert problems == []
        assert newest is not None
        seen.add(content(newest))
        checkpoint.recover(run)
        write_step(run, 3, 3.0)
        assert [content(folder) for folder in checkpoint.of_run(run)] == [1.0, 2.0, 3.0]
        assert len(list(run.iterdir())) == 3, "what was begun is cleared"
    assert seen == {2.0, 3.0}


def test_what_was_moved_aside_is_put_back_wherever_its_writer_is_killed(two_steps: Path) -> None:
    seen = set()
    for run in killed_everywhere(save_second_again, two_steps):
        checkpoint.recover(run)
        assert [path.name for path in sorted(run.iterdir())] == ["step_0000001", "step_0000002"]
        assert content(step_folder(run, 1)) == 1.0
        seen.add(content(step_folder(run, 2)))
    assert seen == {2.0, 2.5}


def test_an_old_checkpoint_is_there_or_not_wherever_its_remover_is_killed(two_steps: Path) -> None:
    for run in killed_everywhere(prune_to_one, two_steps):
        for folder in run.glob("step_*"):
            assert content(folder) in (1.0, 2.0)
        checkpoint.recover(run)
        prune_to_one(run)
        assert [path.name for path in run.iterdir()] == ["step_0000002"]


NOTES = "all my thoughts"


@pytest.mark.parametrize("act", [prune_to_one, save_second_again])
def test_what_somebody_kept_in_a_checkpoint_stays_wherever_it_is_given_up(two_steps: Path, act: Act) -> None:
    """A file and a folder, of both checkpoints."""
    template = two_steps / "template"
    for folder in checkpoint.of_run(template):
        (folder / "notes.txt").write_text(NOTES)
        (folder / "films").mkdir()
        (folder / "films" / "one.gif").write_text(NOTES)
    whole = Path(shutil.copytree(template, two_steps / "whole"))
    act(whole)
    for run in (whole, *killed_everywhere(act, two_steps)):
        checkpoint.recover(run)
        for step in (1, 2):
            assert (step_folder(run, step) / "notes.txt").read_text() == NOTES
            assert (step_folder(run, step) / "films" / "one.gif").read_text() == NOTES
        assert sorted(path.name for path in run.iterdir()) == ["step_0000001", "step_0000002"]


def test_what_is_damaged_and_later_does_not_cost_what_was_just_saved(tmp_path: Path) -> None:
    """A run whose newest checkpoints are damaged goes on from an older one, or begins again."""
    for step in (6, 8):
        write_step(tmp_path, step, float(step))
        (step_folder(tmp_path, step) / checkpoint.WEIGHTS).write_bytes(b"damaged")
    for step in (1, 2, 3, 7, 9):
        write_step(tmp_path, step, float(step))
        assert checkpoint.prune(tmp_path, keep=2, newest=step) == []
        assert content(step_folder(tmp_path, step)) == step
    assert [checkpoint.step_of(folder) for folder in checkpoint.of_run(tmp_path)] == [8, 9]


def test_only_a_step_that_is_gone_is_put_back(tmp_path: Path) -> None:
    """If the new one is in its place, the old one goes; and folders of others stay."""
    for step in (1, 2):
        write_step(tmp_path, step, float(step))
        aside = step_folder(tmp_path, step)
        aside.rename(aside.with_name(f"{checkpoint.ASIDE}{aside.name}"))
    write_step(tmp_path, 2, 2.5)
    (tmp_path / ".step_0000003.elsewhere-1.tmp").mkdir()
    (tmp_path / ".mine").mkdir()
    checkpoint.recover(tmp_path)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [".mine", "step_0000001", "step_0000002"]
    assert [content(step_folder(tmp_path, step)) for step in (1, 2)] == [1.0, 2.5]
    checkpoint.recover(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_checkpoints_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    """Also with one digit more, as after ten million steps."""
    for step in (9, 10_000_000, 9_999_999, 1_000_000):
        write_step(tmp_path, step, float(step))
    names = [folder.name for folder in checkpoint.of_run(tmp_path)]
    assert names == ["step_0000009", "step_1000000", "step_9999999", "step_10000000"]
    assert checkpoint.latest(tmp_path) == tmp_path / "step_10000000"
    assert checkpoint.newest_whole(tmp_path) == (tmp_path / "step_10000000", [])
    assert checkpoint.prune(tmp_path, keep=2, newest=10_000_000) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_10000000", "step_9999999"]


# -- other files -------------------------------------------------------------------------------------------------------


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_new(folder: Path) -> None:
    write_json(folder / "a.json", {"content": "new"})


def test_a_file_is_the_old_or_the_new_one_wherever_its_writer_is_killed(tmp_path: Path) -> None:
    write_json(tmp_path / "template" / "a.json", {"content": "old"})
    seen = set()
    for folder in killed_everywhere(write_new, tmp_path):
        seen.add(read_json(folder / "a.json")["content"])
        write_new(folder)
        assert tree(folder).keys() == {"a.json"}
    assert seen == {"old", "new"}


def export_again(folder: Path) -> None:
    export_run(folder / "model", folder / "toy")


def test_an_export_is_noticed_or_whole_wherever_it_is_killed(debug_run: Path, tmp_path: Path) -> None:
    """It takes the place of one of other weights. Repeating it gives what an undisturbed one gives."""
    newest = checkpoint.resolve(debug_run)
    template = tmp_path / "template"
    shutil.copytree(newest, template / "model")
    other = lewm.load(newest, "cpu")
    with torch.no_grad():
        next(other.parameters()).add_(1)
    files.save(other, template / "other")
    export_run(template / "other", template / "toy")
    shutil.rmtree(template / "other")
    calm = Path(shutil.copytree(template, tmp_path / "calm"))
    export_again(calm)
    known = {files.identity(lewm.load(folder / "toy", "cpu")) for folder in (template, calm)}
    assert len(known) == 2
    refused = 0
    for folder in killed_everywhere(export_again, tmp_path):
        try:
            found = files.identity(lewm.load(folder / "toy", "cpu"))
        except LewmError:
            refused += 1
        else:
            assert found in known
        export_again(folder)
        assert tree(folder) == tree(calm)
    assert refused > 0


def collect_two(folder: Path) -> None:
    collect("tworoom", folder / "d.h5", CollectConfig(2, resolution=28, workers=1))


def test_a_dataset_is_there_or_not_wherever_its_collector_is_killed(tmp_path: Path) -> None:
    (tmp_path / "calm").mkdir()
    collect_two(tmp_path / "calm")
    whole = tree(tmp_path / "calm")
    assert whole.keys() == {"d.h5"}
    for folder in killed_everywhere(collect_two, tmp_path):
        assert tree(folder).get("d.h5") in (None, whole["d.h5"])
        collect_two(folder)
        assert tree(folder) == whole


def evaluate(folder: Path) -> None:
    options = ("--device", "cpu", "--eval.episodes", "2", "--out", str(folder / "results.json"))
    assert cli.run(["eval", str(folder.parent / "model"), *options]) == 0


def answers(path: Path) -> Any:
    """What results say, but for how long they took and where they are from."""
    document = read_json(path)
    return document["question"], document["episodes"], document["rates"]


def test_results_are_there_or_not_wherever_an_evaluation_is_killed(debug_run: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint.resolve(debug_run), tmp_path / "model")
    before = signal.getsignal(signal.SIGTERM)
    try:
        (tmp_path / "calm").mkdir()
        evaluate(tmp_path / "calm")
        calm = answers(tmp_path / "calm" / "results.json")
        for folder in killed_everywhere(evaluate, tmp_path):
            if (folder / "results.json").exists():
                assert answers(folder / "results.json") == calm
            evaluate(folder)
            assert answers(folder / "results.json") == calm
            assert tree(folder).keys() == {"results.json"}
            assert read_rates(folder / "results.json")["policy"].total == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def train_a_little(folder: Path) -> None:
    steps = ("--train.steps", "3", "--train.checkpoint-every", "1", "--train.val-every", "3", "--train.log-every", "1")
    command = ("train", "debug", "--data", str(folder.parent / "d.h5"), "--out", str(folder / "run"), "--device", "cpu")
    assert cli.run([*command, *steps]) == 0


@pytest.mark.slow
def test_a_training_continues_to_the_same_weights_wherever_it_is_killed(debug_config: Config, tmp_path: Path) -> None:
    """Also in what is not a checkpoint: its description, its measurements, its lock."""
    assert debug_config.data is not None
    shutil.copy(debug_config.data, tmp_path / "d.h5")
    before = signal.getsignal(signal.SIGTERM)
    try:
        train_a_little(tmp_path / "calm")
        calm = tree(tmp_path / "calm" / "run" / "checkpoints")
        tensors = {name: content for name, content in calm.items() if name.endswith(".safetensors")}
        assert len(tensors) == 6, "of two checkpoints"
        for folder in killed_everywhere(train_a_little, tmp_path):
            train_a_little(folder)
            ended = tree(folder / "run" / "checkpoints")
            # Killed when it had ended, it has not removed the oldest one, and has no reason to come back.
            assert ended.keys() - calm.keys() in (set(), {name.replace("2/", "1/") for name in calm if "2/" in name})
            assert {name: ended[name] for name in tensors} == tensors
            assert [row["step"] for row in read_metrics(folder / "run" / "metrics.jsonl") if "loss" in row] == [1, 2, 3]
            assert not list((folder / "run").glob(".*"))
    finally:
        signal.signal(signal.SIGTERM, before)
