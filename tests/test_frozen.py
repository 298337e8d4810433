"""What earlier versions wrote is read, evaluated and continued.

frozen/0.1/run is a run of lewm 0.1.0: the preset "debug", stopped after two of four steps. numbers.json is what that
version computed with its model.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import lewm
from lewm import checkpoint, cli
from lewm.cli import info
from lewm.config import Config
from lewm.errors import CheckpointError, TrainingError
from lewm.evaluate.runner import evaluate
from lewm.files import read_json, write_json
from lewm.methods.files import identity, run_settings
from lewm.methods.lewm import LeWM
from lewm.presets import preset, read_config
from lewm.train.logs import read_metrics
from lewm.train.loop import train
from lewm.train.trainer import SilentMonitor

FROZEN = Path(__file__).parent / "frozen" / "0.1"
STEPS = 4


class Notes(SilentMonitor):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the run, to change."""
    return Path(shutil.copytree(FROZEN / "run", tmp_path / "run"))


@pytest.fixture
def model() -> LeWM:
    loaded = lewm.load(FROZEN / "run", device="cpu")
    assert isinstance(loaded, LeWM)
    return loaded


def test_the_run_is_of_the_first_format():
    document = read_json(FROZEN / "run" / "checkpoints" / "step_0000002" / checkpoint.CONFIG)
    assert (document["lewm_version"], document["format_version"]) == ("0.1.0", 1)
    assert not {"digest", "method", "facts"} & document.keys()


def test_its_model_is_what_it_was(model: LeWM):
    assert model.settings == preset("debug").method
    assert model.facts.environment == "lewm/TwoRoom-v0"
    assert model.action_stats is not None
    assert model.recorded_actions is not None
    assert model.recorded_actions.shape[-1] == 2


@torch.inference_mode()
def test_its_model_computes_what_it_did(model: LeWM):
    expected = json.loads((FROZEN / "numbers.json").read_text())
    frames = np.random.default_rng(0).integers(0, 256, (2, 28, 28, 3), dtype=np.uint8)
    z_BTD = model.encode(torch.from_numpy(frames)).unsqueeze(0)
    torch.testing.assert_close(z_BTD[0], torch.tensor(expected["embeddings"]), rtol=1e-3, atol=1e-3)
    future = model.rollout(z_BTD[:, :1], torch.zeros(1, 0, 10), torch.linspace(-1, 1, 20).view(1, 1, 2, 10))
    torch.testing.assert_close(future, torch.tensor(expected["future"]), rtol=1e-3, atol=1e-3)


def test_its_settings_are_read_without_a_loss():
    lost: list[str] = []
    folder = checkpoint.resolve(FROZEN / "run")
    config = run_settings(checkpoint.load_document(folder), folder, lost)
    assert lost == []
    assert config.method == preset("debug").method
    assert replace(config, data=None, out=None, device="auto", train=preset("debug").train) == preset("debug")
    assert config == read_config(read_json(FROZEN / "run" / "config.json"))


def test_info_knows_it():
    rows = info.model(str(FROZEN / "run"))
    assert rows["written by"] == "lewm 0.1.0, format 1"
    assert rows["method"] == "lewm"
    assert rows["environment"] == "lewm/TwoRoom-v0"
    assert "dataset" not in rows  # nothing is known of its content


def test_its_model_is_evaluated(model: LeWM):
    config = run_settings(checkpoint.load_document(folder := checkpoint.resolve(FROZEN / "run")), folder)
    evaluation = evaluate(model, config)
    assert len(evaluation.results) == config.eval.episodes
    assert all(len(result.plans) > 0 for result in evaluation.results)


def test_saved_again_it_is_the_same_model_in_todays_format(model: LeWM, tmp_path: Path):
    model.save_pretrained(tmp_path / "model")
    document = checkpoint.load_document(tmp_path / "model")
    assert document["format_version"] == checkpoint.FORMAT_VERSION == 2
    assert document["facts"]["environment"] == "lewm/TwoRoom-v0"
    again = lewm.load(tmp_path / "model", device="cpu")
    assert identity(again) == identity(model)
    assert isinstance(again, LeWM)
    assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), model.state_dict().values(), strict=True))


def of_four_steps(config: Config, out: Path) -> Config:
    return replace(config, out=out, train=replace(config.train, steps=STEPS))


def losses(run: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_metrics(run / "metrics.jsonl") if "loss" in row}


def test_the_run_is_continued(debug_config: Config, run: Path, tmp_path: Path):
    """With the steps that it would have had: on the processor that it began on, even with the same bits."""
    notes = Notes()
    result = train(of_four_steps(debug_config, run), monitor=notes)
    assert result.steps == STEPS
    assert f"Continuing {run} at step 2." in notes.notes
    train(of_four_steps(debug_config, tmp_path / "new"))
    assert losses(run) == pytest.approx(losses(tmp_path / "new"), rel=1e-2)
    assert losses(run).keys() == {2, 4}

    document = checkpoint.load_document(checkpoint.resolve(run))
    assert document["format_version"] == 2
    assert document["facts"]["dataset"] == result.model.facts.digest is not None
    assert read_json(run / "config.json")["method"]["name"] == "lewm"  # the description became one of today's
    assert train(of_four_steps(debug_config, run)).steps == STEPS
    assert info.model(str(run))["written by"] == f"lewm {lewm.__version__}, format 2"


def test_the_run_is_not_continued_with_other_settings(debug_config: Config, run: Path):
    config = of_four_steps(debug_config, run)
    heavier = replace(config.method, sigreg=replace(config.method.sigreg, weight=0.5))
    with pytest.raises(TrainingError, match=r"method\.sigreg\.weight \(0\.09 -> 0\.5\)"):
        train(replace(config, method=heavier))
    with pytest.raises(TrainingError, match=r"train\.lr"):
        train(replace(config, train=replace(config.train, lr=0.5)))


@pytest.mark.parametrize(
    ("section", "name", "value", "remedy"),
    [
        ("train", "ema", 0.9, "train.final_lr_fraction"),
        ("train", "coarse_steps", 1, "train at full resolution"),
        ("train", "precision", "mixed", "use bf16 or float32"),
        ("sigreg", "t_max", 4.0, "the quadrature is always over [0, 3]"),
    ],
)
def test_a_choice_that_is_gone_ends_a_run_but_not_its_model(
    debug_config: Config,
    run: Path,
    capsys: pytest.CaptureFixture[str],
    section: str,
    name: str,
    value: object,
    remedy: str,
):
    folder = checkpoint.resolve(run)
    for path, inside in ((run / "config.json", ()), (folder / checkpoint.CONFIG, ("run",))):
        document = read_json(path)
        settings = document
        for part in (*inside, section):
            settings = settings[part]
        settings[name] = value
        write_json(path, document)
    arguments = ["train", "debug", f"--data={debug_config.data}", f"--out={run}", "--device=cpu", "--train.steps=4"]
    assert cli.run(arguments) == 1
    refusal = capsys.readouterr().err
    assert f"{section}.{name} was {value!r}, which is gone" in refusal
    assert remedy in refusal

    assert lewm.load(run, device="cpu").settings == preset("debug").method
    out = run.with_name("result.json")
    assert cli.run(["eval", str(run), "--device=cpu", "--eval.episodes=1", f"--out={out}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Of this model's run: {section}.{name} was {value!r}" in said


@pytest.mark.parametrize("name", [checkpoint.WEIGHTS, checkpoint.ACTIONS])
def test_damage_to_what_it_has_digests_of_is_noticed(run: Path, name: str):
    path = checkpoint.resolve(run) / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{name} does not belong to its config\.json"):
        lewm.load(run, device="cpu")


@pytest.mark.parametrize("name", sorted(checkpoint.pretrained_models()))
def test_the_models_that_come_with_lewm_know_their_runs(name: str):
    lost: list[str] = []
    folder = checkpoint.resolve(name)
    document = checkpoint.load_document(folder)
    config = run_settings(document, folder, lost)
    assert lost == []
    assert config.env == document["facts"]["environment"]
    assert config.method == lewm.load(name, device="cpu").settings
