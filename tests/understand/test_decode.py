"""`lewm understand decode`: decoders are bound, resumed and never half-written; films, strips, series and plans."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lewm import cli
from lewm.cli.understand.decode import DecodeArgs
from lewm.config import Config, PlanConfig
from lewm.data.stats import background
from lewm.data.store import EpisodeStore
from lewm.data.windows import split_episodes
from lewm.envs.registry import make_env
from lewm.errors import CheckpointError, ConfigError, FileError
from lewm.evaluate.runner import evaluate
from lewm.methods.lewm import LeWM
from lewm.model.decoder import Decoder
from lewm.train.loop import train
from lewm.understand.decode import DecodeSettings, decode, find_drawer, investigate
from lewm.understand.decode_series import decode_series
from lewm.understand.decoder import DecoderSettings, decoder_place, held_out, load_decoder, train_decoder
from lewm.understand.plans import imagined_plans
from lewm.understand.subject import Subject, open_subject

SETTINGS = DecoderSettings(steps=6, batch_size=8, width=16)


@pytest.fixture
def subject(debug_run: Path) -> Subject:
    return open_subject(debug_run, "cpu")


@pytest.fixture
def store(debug_config: Config) -> EpisodeStore:
    assert debug_config.data
    return EpisodeStore(debug_config.data)


def with_other_weights(subject: Subject, folder: Path) -> Subject:
    model = subject.model
    with torch.no_grad():
        model.predictor.positions.add_(1)  # type: ignore[union-attr, operator]
    return open_subject(model.save_pretrained(folder), "cpu")


# -- the decoder's file ----------------------------------------------------------------------------------------------


def test_it_is_bound_to_its_model(subject: Subject, store: EpisodeStore, tmp_path: Path):
    place = tmp_path / "decoder.safetensors"
    trained = train_decoder(subject, store, SETTINGS, place)
    read = load_decoder(place, subject)
    assert all(torch.equal(t, read.decoder.state_dict()[n]) for n, t in trained.decoder.state_dict().items())
    other = with_other_weights(subject, tmp_path / "other")
    with pytest.raises(CheckpointError, match="decoder of another model"):
        load_decoder(place, other)
    with pytest.raises(CheckpointError, match="no decoder"):
        find_drawer(other, tmp_path / "nothing")


def test_a_damaged_file_is_refused(subject: Subject, store: EpisodeStore, tmp_path: Path):
    place = tmp_path / "decoder.safetensors"
    train_decoder(subject, store, SETTINGS, place)
    content = bytearray(place.read_bytes())
    content[-5] ^= 64
    place.write_bytes(content)
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        load_decoder(place, subject)
    place.write_bytes(b"something else")
    with pytest.raises(CheckpointError, match="no decoder that lewm wrote"):
        load_decoder(place, subject)


def test_it_goes_on_with_the_same_bits(subject: Subject, store: EpisodeStore, tmp_path: Path):
    straight, broken = tmp_path / "straight.safetensors", tmp_path / "broken.safetensors"
    train_decoder(subject, store, SETTINGS, straight)

    def interrupt(done: int, _total: int) -> None:
        if done == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_decoder(subject, store, SETTINGS, broken, interrupt)
    assert not broken.exists()
    steps: list[int] = []
    train_decoder(subject, store, SETTINGS, broken, lambda done, _total: steps.append(done))
    assert steps == [4, 5, 6]
    one, two = load_file(straight), load_file(broken)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.safetensors", "straight.safetensors"]
    train_decoder(subject, store, SETTINGS, broken, lambda *_: pytest.fail("it was trained already"))


KILLED = """
import os, signal, sys
from pathlib import Path
from lewm.data.stats import background
from lewm.data.store import EpisodeStore
from lewm.data.windows import split_episodes
from lewm.understand import decoder
from lewm.understand.subject import open_subject

whole = Path.write_bytes

def half(path, content):
    if ".safetensors" in path.name:
        whole(path, content[: len(content) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(path, content)

Path.write_bytes = half
run, data, place = sys.argv[1:]
settings = decoder.DecoderSettings(steps=1, batch_size=8, width=16)
decoder.train_decoder(open_subject(run, "cpu"), EpisodeStore(data), settings, Path(place))
"""


def test_killed_while_writing_it_leaves_the_old_one(
    subject: Subject, store: EpisodeStore, debug_run: Path, tmp_path: Path
):
    place = tmp_path / "decoder.safetensors"
    train_decoder(subject, store, SETTINGS, place)
    before = place.read_bytes()
    done = subprocess.run([sys.executable, "-c", KILLED, debug_run, store.path, place], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert place.read_bytes() == before
    load_decoder(place, subject)


def test_the_models_folder_stays_as_it_is(subject: Subject, store: EpisodeStore, debug_run: Path):
    from lewm.understand.subject import model_folder

    inside = model_folder(debug_run) / "findings"
    with pytest.raises(FileError, match="lies inside"):
        train_decoder(subject, store, SETTINGS, decoder_place(inside))
    assert not inside.exists()


# -- the verb --------------------------------------------------------------------------------------------------------


def call(*arguments: object) -> int:
    return cli.run(["understand", "decode", *map(str, arguments)])


def test_options_have_the_defaults_of_what_they_set():
    args, training, shown = DecodeArgs(checkpoint="any"), DecoderSettings(), DecodeSettings()
    assert (args.steps, args.batch, args.lr) == (training.steps, training.batch_size, training.lr)
    assert (args.foreground, args.frames, args.width) == (training.foreground, training.frames, training.width)
    assert (args.blocks, args.windows, args.shown) == (shown.blocks, shown.windows, shown.shown)


def test_strip_film_and_findings(debug_run: Path, debug_config: Config, tmp_path: Path, capsys: pytest.CaptureFixture):
    asked = (debug_run, "--data", debug_config.data, "--out", tmp_path, "--windows", 5, "--blocks", 2)
    assert call(*asked) == 1
    assert "--train" in capsys.readouterr().err
    training = ("--train", "--steps", 3, "--batch", 8)
    assert call(*asked, *training) == 0
    out = capsys.readouterr().out
    assert "Frames, by blocks ahead" in out
    found = json.loads((tmp_path / "decode.json").read_text())
    numbers = found["numbers"]
    assert numbers["windows"] == 5
    assert len(numbers["latent"]) == len(numbers["decibels"]["imagined"]) == 2
    assert numbers["places"]["what"] == "dot"
    assert any("6 times" in sentence for sentence in found["sentences"])
    with Image.open(tmp_path / "decode.gif") as film:
        assert film.n_frames == numbers["seen"] + 2
    with Image.open(tmp_path / "decode.png") as figure:
        assert min(figure.size) > 300
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert call(*asked) == 0  # the same question, with the decoder that is there
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before


def test_what_is_shown_is_what_happened(subject: Subject, store: EpisodeStore, tmp_path: Path):
    """With a decoder that draws the same for all embeddings, what happened is real, and its errors are known."""
    place = decoder_place(tmp_path)
    drawer = train_decoder(subject, store, replace(SETTINGS, steps=1), place)
    with torch.no_grad():
        drawer.decoder.pixels.weight.zero_()
        drawer.decoder.pixels.bias.zero_()
    found = decode(subject, store, tmp_path, drawer, DecodeSettings(blocks=2, windows=4, shown=2))
    levels = found.numbers["decibels"]
    assert levels["imagined"] == levels["reconstructed"] == levels["background"]
    assert found.numbers["places"]["errors"]["imagined"][0]["median"] is None  # no dot is drawn, and no NaN is written
    assert found.numbers["places"]["errors"]["nothing moves"][0]["found"] == 4
    with Image.open(tmp_path / "decode.gif") as film:
        film.seek(2)
        tile = np.asarray(film.convert("RGB"), int)[30:190, 10:178]
    red = (tile[..., 0] - tile[..., 2] > 60).sum()
    assert red > 20  # the dot of what happened


def test_a_world_without_a_detector_has_its_decibels(subject: Subject, store: EpisodeStore, tmp_path: Path):
    elsewhere = replace(subject, world=None)
    drawer = train_decoder(elsewhere, store, SETTINGS, decoder_place(tmp_path))
    found = decode(elsewhere, store, tmp_path, drawer, DecodeSettings(blocks=100, windows=4))
    assert "places" not in found.numbers
    assert len(found.tables) == 1
    longest = store.lengths[held_out(store)[1]].max()
    assert len(found.numbers["latent"]) == longest // 5 - 3 < 100  # as many as the longest episode allows
    assert (tmp_path / "decode.png").is_file()
    assert investigate(elsewhere, store, tmp_path, 0, True, None).numbers["windows"] <= 50


def test_a_model_that_was_trained_with_a_decoder_needs_no_other(
    debug_config: Config, store: EpisodeStore, tmp_path: Path
):
    method = replace(debug_config.method, reconstruction=1.0)  # type: ignore[call-arg]
    few = replace(debug_config.train, steps=2, warmup_steps=1, calibration_batches=0)
    train(replace(debug_config, method=method, train=few, out=tmp_path / "run"))
    logged = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "reconstruction_loss" in logged
    subject = open_subject(tmp_path / "run", "cpu")
    drawer = find_drawer(subject, tmp_path / "out")
    assert drawer.decoder is subject.model.decoder
    train_ids, _ = split_episodes(store.num_episodes, debug_config.loader.val_fraction)
    assert np.array_equal(drawer.decoder.background.numpy(), background(store, train_ids))
    found = decode(subject, store, tmp_path / "out", drawer, DecodeSettings(blocks=1, windows=2))
    assert any("method.reconstruction" in sentence for sentence in found.sentences)


def test_series(debug_run: Path, store: EpisodeStore, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(debug_run, run)
    newest = sorted((run / "checkpoints").iterdir())[-1]
    (run / "series").mkdir()
    early = LeWM.from_pretrained(newest, "cpu")
    with torch.no_grad():
        early.predictor.positions.add_(1)
    early.save_pretrained(run / "series" / "step_0000002")
    out, trained = tmp_path / "found", list[str]()

    def progress(name: str) -> Callable[[int, int], None]:
        trained.append(name)
        return lambda *_: None

    found = decode_series(run, store, out, SETTINGS, "cpu", progress)
    assert found.numbers["steps"][0] == 2
    assert len(found.numbers["rows"]) == len(trained) >= 2
    assert (out / "series" / "step_0000002.safetensors").is_file()
    with Image.open(out / "decode_series.png") as figure:
        assert min(figure.size) > 200
    assert (
        call(run, "--data", store.path, "--out", out, "--series", run, "--steps", 6, "--batch", 8, "--width", 16) == 0
    )
    assert not (out / "decode.json").exists()
    again = decode_series(run, store, out, SETTINGS, "cpu", lambda name: pytest.fail(f"{name} was trained already"))
    assert again.numbers == found.numbers
    with pytest.raises(ConfigError, match="holds no checkpoints"):
        decode_series(tmp_path / "found", store, out, SETTINGS, "cpu")


# -- plans -----------------------------------------------------------------------------------------------------------


class Spy(Decoder):
    """Remembers what it was to draw."""

    def frames(self, z: torch.Tensor) -> torch.Tensor:
        self.given = [*getattr(self, "given", []), z]
        return super().frames(z)


@pytest.mark.parametrize("schedule", ["whole", "receding"])
def test_plans_are_imagined_as_they_were_made(debug_config: Config, debug_model: LeWM, schedule: str):
    """Distances of what is drawn to the goal are those that the planner found, for the first and for later plans."""
    plan = PlanConfig(horizon=2, samples=8, iterations=2, elites=2, schedule=schedule)  # type: ignore[arg-type]
    config = replace(debug_config, plan=plan, eval=replace(debug_config.eval, episodes=2, budget=30))
    (first, _) = evaluate(debug_model, config).results
    spy = Spy(8, 28, width=8)
    ((*plans,),) = imagined_plans(debug_model, spy, config.env, plan, [first])
    assert [each.step for each in plans] == list(range(0, 30, 10 if schedule == "whole" else 5))
    with make_env("tworoom", 28) as env:
        goal = debug_model.encode(torch.from_numpy(env.render_states(first.goal[None])))
    for made, z in zip(first.plans, spy.given, strict=True):
        distances = (z[1:] - goal).square().sum(-1)
        np.testing.assert_allclose(distances.detach().numpy(), made.distances, rtol=1e-3, atol=1e-4)
    assert len(plans[0].frames) == 3
    assert np.array_equal(plans[1].at(plans[1].step + 6), plans[1].frames[1])


def test_videos_show_what_plans_imagined(
    debug_run: Path,
    subject: Subject,
    store: EpisodeStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    place = tmp_path / "decoder.safetensors"
    train_decoder(subject, store, SETTINGS, place)

    def width(name: str, *options: object) -> int:
        out = tmp_path / f"{name}.json"
        assert cli.run(["eval", str(debug_run), "--out", str(out), "--videos", "1", *map(str, options)]) == 0
        (film,) = (tmp_path / f"{name}_videos").iterdir()
        with Image.open(film) as opened:
            return opened.width

    monkeypatch.chdir(tmp_path)
    plain = width("without")
    assert width("with", "--decoder", place) > plain + 100
    beside = decoder_place(Path("understanding") / debug_run.name)
    beside.parent.mkdir(parents=True)
    shutil.copy(place, beside)
    assert width("beside") > plain + 100
    train_decoder(with_other_weights(subject, tmp_path / "other"), store, SETTINGS, beside)  # another model's
    assert width("not_its_own") == plain
    capsys.readouterr()
    assert cli.run(["eval", str(debug_run), "--decoder", str(place)]) == 1
    assert "--videos" in capsys.readouterr().err
