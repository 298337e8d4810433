"""Training: it learns, it continues exactly where it stopped, and it stops when something is wrong."""

from __future__ import annotations

import contextlib
import errno
import itertools
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lewm import checkpoint
from lewm.config import Config
from lewm.data.collect import collect
from lewm.data.stats import background
from lewm.data.store import EpisodeStore
from lewm.data.windows import split_episodes
from lewm.errors import ConfigError, DataError, FileError, TrainingError
from lewm.files import json_digest, read_json, write_json
from lewm.methods.files import run_settings
from lewm.methods.lewm import LeWM
from lewm.train import distributed, inputs, trainer
from lewm.train.distributed import Processes
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.trainer import SilentMonitor
from lewm.types import Losses

STEPS = 10  # Checkpoints are written after 4, 8 and the last.


def with_training(config: Config, out: Path, **changes: Any) -> Config:
    return replace(config, out=out, train=replace(config.train, **{"steps": STEPS, **changes}))


def saved_tensors(run: Path) -> dict[str, torch.Tensor]:
    """Weights and optimiser state of a run's newest checkpoint."""
    folder = checkpoint.latest(run / "checkpoints")
    assert folder is not None
    return checkpoint.read_tensors(folder / checkpoint.WEIGHTS) | checkpoint.read_tensors(folder / checkpoint.OPTIMIZER)


def assert_same_run(one: Path, other: Path) -> None:
    """Bitwise the same weights, optimiser state and measurements, but for the speed."""
    a, b = saved_tensors(one), saved_tensors(other)
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
    rows = [read_metrics(run / "metrics.jsonl") for run in (one, other)]
    for row in rows[0] + rows[1]:
        row.pop("steps_per_second", None)
    assert rows[0] == rows[1]


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class ActAt(SilentMonitor):
    """Does something after a step."""

    def __init__(self, step: int) -> None:
        self.when = step

    def act(self) -> None: ...

    def step(self, step: int, total: int, values: dict[str, float]) -> None:  # noqa: ARG002
        if step == self.when:
            self.act()


class Terminate(ActAt):
    def act(self) -> None:
        signal.raise_signal(signal.SIGTERM)


def stop(config: Config, step: int) -> None:
    """Train until SIGTERM comes at this step: what was learned is on disk before it interrupts."""
    assert config.out is not None
    with pytest.raises(KeyboardInterrupt):
        train(config, monitor=Terminate(step))
    newest = checkpoint.latest(config.out / "checkpoints")
    assert newest is not None
    assert newest.name == f"step_{step:07d}"


class Crash(ActAt):
    def act(self) -> NoReturn:
        raise ZeroDivisionError


class Notes(SilentMonitor):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused is refused before frames are read, which may take an hour."""

    def decode(*_: Any) -> NoReturn:
        raise AssertionError("frames are read before it is refused")

    monkeypatch.setattr(inputs, "open_frames", decode)


@pytest.fixture(scope="module")
def undisturbed(debug_config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of STEPS steps from beginning to end."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    train(with_training(debug_config, out))
    return out


class SignalledInTheVote(Processes):
    """A signal arrives while the processes count their votes, too late for this one."""

    votes = 0

    def any(self, flag: bool) -> bool:
        counted = super().any(flag)
        SignalledInTheVote.votes += 1
        if SignalledInTheVote.votes == 3:
            signal.raise_signal(signal.SIGTERM)
        return counted


# -- learning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_loss_falls(debug_config: Config, tmp_path: Path, optimizer: str):
    result = train(with_training(debug_config, tmp_path, steps=60, checkpoint_every=60, optimizer=optimizer))
    assert result.steps == 60
    rows = read_metrics(tmp_path / "metrics.jsonl")
    for name, wanted_share in (("loss", 0.7), ("prediction_loss", 0.3), ("val/loss", 0.7)):
        values = [row[name] for row in rows if name in row]
        assert sum(values[-3:]) < wanted_share * sum(values[:3]), name


def test_the_result_is_what_is_on_disk(debug_config: Config, tmp_path: Path):
    result = train(with_training(debug_config, tmp_path))
    loaded = LeWM.from_pretrained(tmp_path, device="cpu")
    assert result.checkpoint == tmp_path / "checkpoints" / "step_0000010"
    assert not result.model.training
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    assert loaded.action_stats == result.model.action_stats is not None


def test_the_seed_decides_the_weights(debug_config: Config, undisturbed: Path, tmp_path: Path):
    train(with_training(debug_config, tmp_path / "same"))
    train(replace(with_training(debug_config, tmp_path / "other"), seed=1))
    assert_same_run(tmp_path / "same", undisturbed)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path / "other", undisturbed)


def test_each_step_has_a_dropout_of_its_own(debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    honest, seeds = LeWM.losses, []

    def spy(model: LeWM, *arguments: Any) -> Losses:
        if torch.is_grad_enabled():  # not in validation
            seeds.append(torch.initial_seed())
        return honest(model, *arguments)

    monkeypatch.setattr(LeWM, "losses", spy)
    train(with_training(debug_config, tmp_path))
    assert len(seeds) == len(set(seeds)) == STEPS


# -- the record -----------------------------------------------------------------------------------------------


def test_measurements_are_written_when_they_are_due(undisturbed: Path):
    rows = read_metrics(undisturbed / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [2, 4, 6, 8, 10]
    assert [row["step"] for row in rows if "val/loss" in row] == [4, 8, 10]
    for row in rows:
        if "loss" in row:
            assert row["loss"] == pytest.approx(row["prediction_loss"] + 0.09 * row["sigreg_loss"], rel=1e-5)


def test_tensorboard_shows_the_same_measurements(undisturbed: Path):
    board = EventAccumulator(str(undisturbed / "tensorboard"))
    board.Reload()
    recorded = {(name, event.step): event.value for name in board.Tags()["scalars"] for event in board.Scalars(name)}
    expected = {
        (name, row["step"]): pytest.approx(value, rel=1e-5)
        for row in read_metrics(undisturbed / "metrics.jsonl")
        for name, value in row.items()
        if name != "step"
    }
    assert recorded == expected


def test_only_the_newest_checkpoints_are_kept(debug_config: Config, tmp_path: Path):
    train(with_training(debug_config, tmp_path, checkpoint_every=2))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_0000008", "step_0000010"]


# -- interruptions --------------------------------------------------------------------------------------------


def test_dropout_is_on_so_that_resuming_is_a_real_test(debug_config: Config):
    assert debug_config.method.predictor.dropout > 0


@pytest.mark.parametrize("step", [1, 4, 7, 9])
def test_a_stopped_run_continues_to_the_same_weights(
    debug_config: Config, undisturbed: Path, tmp_path: Path, step: int
):
    """Before the first checkpoint, right at one, between two, and just before the end."""
    config = with_training(debug_config, tmp_path / "run")
    stop(config, step)
    assert train(config).steps == STEPS
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("step", [3, 7])
def test_a_crashed_run_repeats_what_was_lost(debug_config: Config, undisturbed: Path, tmp_path: Path, step: int):
    config = with_training(debug_config, tmp_path / "run")
    with pytest.raises(ZeroDivisionError):
        train(config, monitor=Crash(step))
    notes = Notes()
    train(config, monitor=notes)
    assert any("at step 4" in note for note in notes.notes) == (step > 4)
    assert_same_run(tmp_path / "run", undisturbed)


def test_many_interruptions_change_nothing(debug_config: Config, undisturbed: Path, tmp_path: Path):
    config = with_training(debug_config, tmp_path / "run")
    for step in range(1, STEPS):
        stop(config, step)
    train(config)
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_signal_during_the_vote_counts_in_the_next_one(
    debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(SignalledInTheVote, "votes", 0)
    monkeypatch.setattr(distributed, "SINGLE", SignalledInTheVote())
    with contextlib.suppress(KeyboardInterrupt):
        train(with_training(debug_config, tmp_path))
    newest = checkpoint.latest(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step_0000003"


def test_a_finished_run_is_left_as_it_is(debug_config: Config, undisturbed: Path):
    before = files_below(undisturbed / "checkpoints")
    result = train(with_training(debug_config, undisturbed))
    assert result.steps == STEPS
    assert files_below(undisturbed / "checkpoints") == before


def test_signal_handlers_are_restored(debug_config: Config, tmp_path: Path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train(with_training(debug_config, tmp_path, steps=1, warmup_steps=0))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_settings_that_do_not_change_the_weights_may_change_and_are_saved(debug_config: Config, tmp_path: Path):
    config = with_training(debug_config, tmp_path / "run")
    stop(config, 5)
    quieter = with_training(debug_config, tmp_path / "run", log_every=5, val_every=5, checkpoint_every=3)
    result = train(replace(quieter, plan=replace(config.plan, samples=77)))
    saved = run_settings(checkpoint.load_document(result.checkpoint), result.checkpoint)
    assert (saved.plan.samples, saved.train) == (77, quieter.train)
    assert read_json(tmp_path / "run" / "config.json")["plan"]["samples"] == 77


def test_a_signal_at_the_last_step_interrupts_as_well(debug_config: Config, undisturbed: Path, tmp_path: Path):
    """Whoever called it was asked to stop, though there is nothing left to train."""
    stop(with_training(debug_config, tmp_path / "run"), STEPS)
    assert_same_run(tmp_path / "run", undisturbed)


SCRIPT = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
import lewm
from lewm.train.loop import train
from lewm.train.trainer import SilentMonitor

class Interrupt(SilentMonitor):
    def step(self, step, total, values):
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

config = replace(lewm.preset("debug"), data=Path(sys.argv[1]), out=Path(sys.argv[2]), device="cpu")
model = train(config, monitor=Interrupt()).model
print("plans with it")
"""


@pytest.mark.slow
def test_a_script_does_not_go_on_with_half_a_model(debug_config: Config, tmp_path: Path):
    command = [sys.executable, "-c", SCRIPT, str(debug_config.data), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode not in (0, 1), done.stderr
    assert "KeyboardInterrupt" in done.stderr
    assert "plans with it" not in done.stdout
    assert checkpoint.resolve(tmp_path / "run").name == "step_0000003"


@pytest.mark.parametrize(
    ("device", "word"),
    [
        ("1 × NVIDIA H200, torch 2.11.0", "computed in bf16 (1 × NVIDIA H200, torch 2.11.0), from here on in float32"),
        ("1 × mps, torch 2.11.0", None),
        ("2 × cpu, torch 2.11.0", None),
    ],
)
def test_other_arithmetic_is_said(debug_config: Config, tmp_path: Path, device: str, word: str | None):
    config = with_training(debug_config, tmp_path / "run")
    stop(config, 5)
    path = tmp_path / "run" / "checkpoints" / "step_0000005" / checkpoint.CONFIG
    document = read_json(path)
    document["training"]["device"] = device
    document["digest"] = json_digest({name: value for name, value in document.items() if name != "digest"})
    write_json(path, document)
    notes = Notes()
    train(config, monitor=notes)
    said = [note for note in notes.notes if "computed in" in note]
    assert len(said) == (word is not None)
    assert word is None or word in said[0]


# -- what is refused ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize("change", [{"lr": 0.5}, {"steps": 20}, {"final_lr_fraction": 1.0}, {"calibration_batches": 3}])
def test_another_run_is_not_continued(debug_config: Config, undisturbed: Path, change: dict[str, Any]):
    before = files_below(undisturbed)
    (name,) = change
    with pytest.raises(TrainingError, match=rf"another run: train\.{name} \(.*\)\. Choose another folder"):
        train(with_training(debug_config, undisturbed, **change))
    assert files_below(undisturbed) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"warmup_steps": STEPS}, rf"train\.warmup_steps must be less than train\.steps \({STEPS}\), got {STEPS}"),
        ({"warmup_steps": 5, "schedule_steps": 4}, r"must be less than train\.schedule_steps \(4\), got 5"),
    ],
)
def test_a_learning_rate_that_never_comes_down_is_refused(
    debug_config: Config, tmp_path: Path, changes: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        train(with_training(debug_config, tmp_path / "run", **changes))
    assert list(tmp_path.iterdir()) == []


def test_a_run_from_before_that_was_refused_is_read_and_ends(debug_config: Config, tmp_path: Path):
    config = with_training(debug_config, tmp_path / "run", warmup_steps=5)
    stop(config, 5)
    for path, inside in ((tmp_path / "run" / "config.json", False), (checkpoint.resolve(tmp_path / "run"), True)):
        path = path / checkpoint.CONFIG if inside else path
        document = read_json(path)
        (document["run"] if inside else document)["train"]["warmup_steps"] = STEPS
        if inside:
            document["digest"] = json_digest({name: value for name, value in document.items() if name != "digest"})
        write_json(path, document)
    assert train(with_training(debug_config, tmp_path / "run", warmup_steps=STEPS)).steps == STEPS


def test_a_run_is_not_continued_on_other_data(debug_config: Config, tmp_path: Path):
    config = with_training(debug_config, tmp_path / "run")
    stop(config, 4)
    with pytest.raises(TrainingError, match=r"loader\.val_fraction \(0\.1 -> 0\.3\)"):
        train(replace(config, loader=replace(config.loader, val_fraction=0.3)))


@pytest.mark.usefixtures("no_decoding")
def test_another_dataset_is_refused_before_anything_is_done(debug_config: Config, undisturbed: Path, tmp_path: Path):
    collect(debug_config.env, tmp_path / "other.h5", debug_config.collect, seed=5)
    before = files_below(undisturbed)
    with pytest.raises(TrainingError, match=r"was trained on another dataset.*Continue with the dataset the run began"):
        train(replace(with_training(debug_config, undisturbed), data=tmp_path / "other.h5"))
    assert files_below(undisturbed) == before


@pytest.mark.usefixtures("no_decoding")
def test_resume_never_refuses_a_run(debug_config: Config, undisturbed: Path):
    before = files_below(undisturbed)
    with pytest.raises(TrainingError, match=r"already holds a run.*--resume auto"):
        train(with_training(debug_config, undisturbed), resume="never")
    assert files_below(undisturbed) == before


@pytest.mark.usefixtures("no_decoding")
def test_a_folder_with_other_files_is_not_touched(debug_config: Config, tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("all my work")
    with pytest.raises(TrainingError, match=r"not empty and is not a training run.*--out"):
        train(with_training(debug_config, tmp_path))
    assert files_below(tmp_path) == {tmp_path / "thesis.tex": b"all my work"}


@pytest.mark.usefixtures("no_decoding")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": None}, "--data FILE"),
        ({"data": Path("no/such/file.h5")}, "no/such/file.h5"),
        ({"env": "lewm/Other-v0"}, "lewm/TwoRoom-v0.*lewm/Other-v0|lewm/Other-v0.*lewm/TwoRoom-v0"),
        ({"image_size": 56}, "frames of 28 pixels.*takes 56"),
        ({"action_dim": 3}, "action"),
        ({"batch_size": 10_000}, "training windows, fewer than one batch of 10000"),
    ],
)
def test_unfit_data_is_refused_before_anything_is_written(
    debug_config: Config, tmp_path: Path, changes: dict[str, Any], message: str
):
    config, model = with_training(debug_config, tmp_path / "run"), debug_config.method
    if "image_size" in changes:
        config = replace(config, method=replace(model, encoder=replace(model.encoder, **changes)))
    elif "action_dim" in changes:
        config = replace(config, method=replace(model, **changes))
    elif "batch_size" in changes:
        config = with_training(debug_config, tmp_path / "run", **changes)
    else:
        config = replace(config, **changes)
    with pytest.raises(DataError, match=message):
        train(config)
    assert list(tmp_path.iterdir()) == []


# -- what goes wrong on the way -------------------------------------------------------------------------------


def spoil_step(monkeypatch: pytest.MonkeyPatch, bad_step: int, gradient_only: bool) -> None:
    """Make the loss of one step (counted from 1), or only its gradient, not a number."""
    honest, steps = LeWM.losses, itertools.count(1)

    def spoilt(model: LeWM, *arguments: Any) -> Losses:
        losses = honest(model, *arguments)
        if not torch.is_grad_enabled() or next(steps) != bad_step:  # validation is not a step
            return losses
        zero = losses.total - losses.total.detach()
        # The root of 0 is 0 and its slope infinite.
        return replace(losses, total=losses.total + (zero.abs().sqrt() if gradient_only else zero * torch.nan))

    monkeypatch.setattr(LeWM, "losses", spoilt)


@pytest.mark.parametrize("gradient_only", [False, True])
@pytest.mark.parametrize("bad_step", [6, 8])
def test_a_loss_that_is_not_finite_stops_the_run(
    debug_config: Config,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    bad_step: int,
    gradient_only: bool,
):
    """No checkpoint is written after it, and the last one before it leads to the weights of a healthy run."""
    # Nobody looks between the checkpoints: the bad step is named all the same.
    config = with_training(debug_config, tmp_path / "run", log_every=100)
    with monkeypatch.context() as patch:
        spoil_step(patch, bad_step, gradient_only)
        with pytest.raises(TrainingError, match=rf"step {bad_step}\b.*not finite.*step_0000004.*train\.lr"):
            train(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_0000004"]
    train(with_training(debug_config, tmp_path / "run"))
    healthy, continued = saved_tensors(undisturbed), saved_tensors(tmp_path / "run")
    assert all(torch.equal(healthy[name], continued[name]) for name in healthy)


def test_a_hopeless_learning_rate_ends_with_advice(debug_config: Config, tmp_path: Path):
    with pytest.raises(TrainingError, match=r"not finite.*No checkpoint yet.*Lower train\.lr"):
        train(with_training(debug_config, tmp_path, lr=1e9, log_every=4))


def test_collapse_is_noticed_once_after_the_warm_up(
    debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    collapsed = {"embedding_std": 0.001, "effective_rank": 1.0, "straightness": 0.0}
    monkeypatch.setattr(trainer, "diagnose", lambda _: collapsed)
    notes = Notes()
    train(with_training(debug_config, tmp_path, steps=8, warmup_steps=4), monitor=notes)
    warned = [note.split(":")[0] for note in notes.notes if "collapsed" in note]
    assert warned == ["Step 6"]


@pytest.mark.parametrize(("weight", "collapses"), [(0.0, True), (1.0, False)])
def test_only_training_without_sigreg_collapses(debug_config: Config, tmp_path: Path, weight: float, collapses: bool):
    config = with_training(debug_config, tmp_path, steps=30, batch_size=16, lr=1e-2, log_every=10)
    notes = Notes()
    sigreg = replace(config.method.sigreg, weight=weight)
    train(replace(config, method=replace(config.method, sigreg=sigreg)), monitor=notes)
    warnings = [note for note in notes.notes if "collapsed" in note]
    assert bool(warnings) == collapses
    assert all("Raise method.sigreg.weight or lower train.lr." in warning for warning in warnings)


def test_a_full_disk_leaves_the_last_checkpoint(
    debug_config: Config, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    config = with_training(debug_config, tmp_path / "run")
    write_tensors = checkpoint.write_tensors

    def disk_full_after_first_checkpoint(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if "step_0000004" not in str(path):
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_tensors(path, tensors)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", disk_full_after_first_checkpoint)
        with pytest.raises(FileError, match=r"disk is full.*step_0000008.*start again"):
            train(config)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_0000004"]
    train(config)
    assert_same_run(tmp_path / "run", undisturbed)


def test_running_out_of_memory_says_what_to_lower(
    debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def exhausted(*_: Any) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation")

    monkeypatch.setattr(LeWM, "losses", exhausted)
    with pytest.raises(TrainingError, match=r"Tried to allocate.*Lower train\.batch-size \(now 4\).*loader\.cache"):
        train(with_training(debug_config, tmp_path))


# -- another optimiser ----------------------------------------------------------------------------------------


def test_a_stopped_run_with_muon_continues_to_the_same_weights(debug_config: Config, undisturbed: Path, tmp_path: Path):
    """To others than those of AdamW, and never from one optimiser to the other."""
    train(with_training(debug_config, tmp_path / "calm", optimizer="muon"))
    disturbed = with_training(debug_config, tmp_path / "disturbed", optimizer="muon")
    for step in (1, 6):
        stop(disturbed, step)
    with pytest.raises(TrainingError, match=r"another run: train\.optimizer \('muon' -> 'adamw'\)"):
        train(with_training(debug_config, tmp_path / "disturbed"))
    train(disturbed)
    assert_same_run(tmp_path / "disturbed", tmp_path / "calm")
    weight = "encoder.blocks.0.attention.qkv.weight"
    assert not torch.equal(saved_tensors(tmp_path / "calm")[weight], saved_tensors(undisturbed)[weight])


# -- settings that have changed -------------------------------------------------------------------------------


def test_a_run_from_before_a_setting_existed_continues(debug_config: Config, undisturbed: Path, tmp_path: Path):
    config = with_training(debug_config, tmp_path / "run")
    stop(config, 5)
    document = read_json(tmp_path / "run" / "config.json")
    del document["train"]["fused"], document["train"]["compile"]
    write_json(tmp_path / "run" / "config.json", document)
    assert train(config).steps == STEPS
    assert_same_run(tmp_path / "run", undisturbed)


# -- patches that are left out --------------------------------------------------------------------------------


def keeping(config: Config, count: int) -> Config:
    encoder = replace(config.method.encoder, kept_patches=count)
    return replace(config, method=replace(config.method, encoder=encoder))


@pytest.mark.parametrize(("count", "enough"), [(1, False), (4, True)])
def test_a_run_says_if_frames_show_more_than_is_looked_at(
    debug_config: Config, tmp_path: Path, count: int, enough: bool
) -> None:
    notes = Notes()
    train(with_training(keeping(debug_config, count), tmp_path / "run", steps=1, warmup_steps=0), monitor=notes)
    said = [note for note in notes.notes if "more patches (up to " in note and f"than the {count} that" in note]
    assert bool(said) != enough


def test_a_run_that_leaves_out_background_continues_and_keeps_what_it_took_for_it(
    debug_config: Config, undisturbed: Path, tmp_path: Path
):
    config = keeping(debug_config, 2)
    result = train(with_training(config, tmp_path / "whole"))
    with EpisodeStore(debug_config.data) as store:  # type: ignore[arg-type]
        training, _ = split_episodes(store.num_episodes, config.loader.val_fraction)
        assert (result.model.encoder.background.numpy() == background(store, training)).all()
    assert result.model.encoder.background.float().std() > 0
    stop(with_training(config, tmp_path / "parts"), 5)
    train(with_training(config, tmp_path / "parts"))
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
    weights = [saved_tensors(run)["encoder.positions"] for run in (tmp_path / "whole", undisturbed)]
    assert not torch.equal(*weights)
    loaded = LeWM.from_pretrained(tmp_path / "whole", device="cpu")
    frames = torch.randint(0, 256, (4, 28, 28, 3), dtype=torch.uint8)
    with torch.inference_mode():
        assert torch.equal(loaded.encode(frames), result.model.encode(frames))


def test_a_run_continues_only_with_the_patches_it_began_with(debug_config: Config, tmp_path: Path):
    stop(with_training(keeping(debug_config, 2), tmp_path), 5)
    with pytest.raises(TrainingError, match=r"kept_patches \(2 -> 3\)"):
        train(with_training(keeping(debug_config, 3), tmp_path))
