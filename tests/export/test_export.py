"""Exported models: small, strict, found by name, with a card whose figures are theirs."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lewm
from lewm import checkpoint, cli
from lewm.cli import info
from lewm.cli.collect import CollectArgs
from lewm.cli.eval import EvalArgs
from lewm.cli.frame import parse
from lewm.cli.train import TrainArgs
from lewm.config import CollectConfig, Config, IcemConfig, PlanConfig
from lewm.data.collect import collect
from lewm.data.record import collect_settings
from lewm.data.store import EpisodeStore
from lewm.errors import CheckpointError, DataError
from lewm.evaluate.results import model_files
from lewm.evaluate.runner import evaluate
from lewm.export.card import CARD, _planner
from lewm.export.commands import collect_command, eval_command, train_command
from lewm.export.writer import export_run
from lewm.files import json_digest, read_json
from lewm.methods.files import run_settings
from lewm.methods.lewm import LeWM
from lewm.plan.planner import Planner
from lewm.presets import preset, read_config
from lewm.train.loop import train


def load(source: str | Path) -> LeWM:
    return LeWM.from_pretrained(source, device="cpu")


@pytest.fixture
def exported(debug_run: Path, tmp_path: Path) -> Path:
    return export_run(debug_run, tmp_path / "toy")


def evaluation_of(folder: Path, path: Path, **plan: Any) -> Path:
    """What `lewm eval FOLDER --out PATH` writes, for two pairs."""
    run = run_settings(checkpoint.load_document(folder), folder)
    config = replace(run, device="cpu", plan=replace(run.plan, **plan))
    evaluate(load(folder), config).save(path, model_files(folder))
    return path


def frames(count: int, size: int = 28) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8))


def rewrite(path: Path, document: dict[str, Any]) -> None:
    """Put another description in the place of a model's, with the digest that such a one has."""
    del document["digest"]
    path.write_text(json.dumps(document | {"digest": json_digest(document)}))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


# -- weights ------------------------------------------------------------------------------------------------------


def test_matrices_are_bf16_and_everything_else_is_exact(exported: Path, debug_model: LeWM) -> None:
    matrices = {name for name, parameter in debug_model.named_parameters() if parameter.ndim > 1}
    stored = load_file(exported / checkpoint.WEIGHTS)
    for name, tensor in debug_model.state_dict().items():
        expected = tensor.bfloat16() if name in matrices else tensor
        assert stored[name].dtype == expected.dtype, name
        assert torch.equal(stored[name], expected), name
    assert stored["projector.1.running_var"].dtype == torch.float32
    loaded = load(exported)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert not loaded.training


def test_a_background_is_exported_as_it_is(debug_config: Config, tmp_path: Path) -> None:
    encoder = replace(debug_config.method.encoder, kept_patches=3)
    config = replace(debug_config, method=replace(debug_config.method, encoder=encoder), out=tmp_path / "run")
    trained = train(config).model
    out = export_run(tmp_path / "run", tmp_path / "toy")
    assert torch.equal(load(out).encoder.background, trained.encoder.background)
    assert load_file(out / checkpoint.WEIGHTS)["encoder.background"].dtype == torch.uint8
    assert "ViT/14 at 28 px, 3 of 4 patches" in (out / CARD).read_text()
    assert "3 of 4 patches" in info.model(str(out))["encoder"]


def test_recorded_actions_go_from_the_data_to_whoever_plans(debug_config: Config, tmp_path: Path) -> None:
    config = replace(debug_config, out=tmp_path / "run", train=replace(debug_config.train, steps=2, warmup_steps=1))
    result = train(config)
    out = export_run(tmp_path / "run", tmp_path / "toy")
    plan = replace(preset("debug").plan, solver="icem", icem=IcemConfig(recorded=1))
    assert config.data is not None
    with EpisodeStore(config.data) as store:
        rows = store.actions[np.isfinite(store.actions).all(1)]
    for model in (result.model, load(tmp_path / "run"), load(out)):
        recorded = model.recorded_actions
        assert recorded is not None
        assert np.isin(recorded.flatten(0, 1).numpy()[:, 0], rows[:, 0]).all()
        planned = Planner(model, config=plan).plan(frames(1).numpy()[0], frames(2).numpy()[1])
        assert planned.actions.shape == (plan.horizon * 5, 2)
    assert recorded is not None
    assert info.model(str(out))["recorded actions"] == f"{len(recorded):,} sequences of {recorded.shape[1]}"


@torch.inference_mode()
def test_embeddings_and_predictions_change_as_little_as_bf16_allows(exported: Path, debug_model: LeWM) -> None:
    loaded, images = load(exported), frames(24)
    z, actions = debug_model.encode(images), torch.randn(8, 3, 10, generator=torch.manual_seed(0))
    predictions = [model.predict(z.view(8, 3, -1), actions) for model in (debug_model, loaded)]
    for before, after in ((z, loaded.encode(images)), predictions):
        change = ((after - before).norm(dim=-1) / before.norm(dim=-1)).max().item()
        assert 0 < change < 0.05


def test_two_loads_give_the_same_plan(exported: Path) -> None:
    config, images = preset("debug").plan, frames(2).numpy()
    plans = [Planner(load(exported), config=config).plan(images[0], images[1]) for _ in range(2)]
    assert np.array_equal(plans[0].actions, plans[1].actions)
    assert np.array_equal(plans[0].distances, plans[1].distances)


def test_a_full_size_model_takes_36_megabytes(tmp_path: Path) -> None:
    LeWM(preset("pusht").method).save_pretrained(tmp_path / "model")
    out = export_run(tmp_path / "model", tmp_path / "toy")
    assert 36.0e6 < (out / checkpoint.WEIGHTS).stat().st_size < 36.5e6
    card = (out / CARD).read_text()
    assert "| parameters | 18.03 M, matrices in bf16" in card
    assert "training | not recorded" in card
    assert "TwoRoom" not in card, "nobody knows what it was trained on"
    assert contents(export_run(out, tmp_path / "again" / "toy")) == contents(out)
    assert info.model(str(out))["weights"] == "bf16, 36.4 MB"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("encoder.positions"), "missing encoder.positions"),
        (lambda tensors: tensors.update(extra=torch.zeros(1)), "unexpected extra"),
        (lambda tensors: tensors.update({"encoder.positions": torch.zeros(2).bfloat16()}), "instead of"),
        (
            lambda tensors: tensors.update({"encoder.positions": tensors["encoder.positions"].half()}),
            "type torch.float16 instead of torch.float32",
        ),
        (
            lambda tensors: tensors.update({"projector.1.num_batches_tracked": torch.tensor(3.0)}),
            "type torch.float32 instead of torch.int64",
        ),
    ],
    ids=["missing", "extra", "misshapen", "half", "counter"],
)
def test_loading_is_strict(exported: Path, change: Callable[[dict[str, torch.Tensor]], Any], message: str) -> None:
    tensors = load_file(exported / checkpoint.WEIGHTS)
    change(tensors)
    checkpoint.save_model(exported, {checkpoint.WEIGHTS: tensors}, checkpoint.load_document(exported))
    with pytest.raises(CheckpointError, match=message):
        load(exported)


def test_the_digest_is_the_files(exported: Path) -> None:
    tensors = load_file(exported / checkpoint.WEIGHTS)
    assert checkpoint.weights_digest(tensors) == checkpoint.load_document(exported)["files"][checkpoint.WEIGHTS]


# -- description and card -----------------------------------------------------------------------------------------


def test_the_description_says_where_the_model_comes_from(exported: Path, debug_config: Config) -> None:
    document = json.loads((exported / checkpoint.CONFIG).read_text())
    assert document["facts"]["environment"] == "lewm/TwoRoom-v0"
    assert document["method"]["name"] == "lewm"
    assert document["method"]["frame_skip"] == 5
    assert len(document["facts"]["actions"]["mean"]) == 2
    assert document["facts"]["episodes"] == 8
    assert document["training"]["step"] == 8
    assert document["training"]["minutes"] > 0
    assert document["data"]["episodes"] == 8
    assert document["data"]["seed"] == 0
    assert document["run"]["train"]["steps"] == 8
    assert debug_config.data is not None
    assert str(debug_config.data.parent) not in (exported / checkpoint.CONFIG).read_text(), "no one's folders"
    assert info.model(str(exported))["weights"].startswith("bf16, ")


def test_a_card_has_the_figures_of_the_exported_model(exported: Path, debug_run: Path, tmp_path: Path) -> None:
    assert "Not evaluated yet." in (exported / CARD).read_text()
    weights = (exported / checkpoint.WEIGHTS).read_bytes()
    results = [
        evaluation_of(exported, tmp_path / f"{name}.json", schedule=name) for name in ("whole", "shrinking", "soonest")
    ]
    export_run(debug_run, exported, results)
    card = (exported / CARD).read_text()
    assert (exported / checkpoint.WEIGHTS).read_bytes() == weights
    rates = json.loads(results[1].read_text())["rates"]
    planned, random = rates["policy"], rates["random"]
    (row,) = (line for line in card.splitlines() if line.startswith("| paper | shrinking |"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[2].endswith(f"({planned['successes']}/2)")
    assert cells[4].endswith(f"({random['successes']}/2)")
    assert "[" in cells[2], "an interval"
    assert cells[6] == f"{rates['solved_at_start']['successes']}/2"
    assert cells[7] == "cem 8×3, 2 elites, horizon 2"
    for part in ("8 of 8, 4 windows each", "minutes", "goals 25 steps ahead, 10 actions", "AdamW", "lewm/TwoRoom-v0"):
        assert part in card
    assert "lewm eval toy --plan.schedule shrinking" in card

    before = contents(exported)
    export_run(debug_run, exported, results[::-1])
    assert contents(exported) == before, "exporting again changes nothing, in whatever order the results come"


def test_a_card_keeps_its_figures_as_long_as_the_weights_stay(
    exported: Path, debug_run: Path, debug_config: Config, tmp_path: Path
) -> None:
    whole, late, again = (
        evaluation_of(exported, tmp_path / f"{name}.json", schedule=schedule)
        for name, schedule in (("whole", "whole"), ("late", "shrinking"), ("again", "whole"))
    )
    export_run(debug_run, exported, [whole, late])
    together = contents(exported)
    export_run(debug_run, tmp_path / "other" / "toy", [late])
    export_run(debug_run, tmp_path / "other" / "toy", [whole])
    assert contents(tmp_path / "other" / "toy") == together, "one after the other is as good as together"
    assert contents(export_run(debug_run, exported)) == together
    assert contents(export_run(exported, tmp_path / "copies" / "toy")) == together

    document = read_json(again)
    other = (document["rates"]["random"]["successes"] + 1) % 3
    document["rates"]["random"]["successes"] = other
    document["config"]["eval"]["workers"] = 2
    again.write_text(json.dumps(document))
    card = (export_run(debug_run, exported, [again]) / CARD).read_text()
    (row,) = (line for line in card.splitlines() if line.startswith("| paper | whole |"))
    assert row.split(" | ")[4].endswith(f"({other}/2)"), "a second answer to a question takes the place of the first"
    assert "| paper | shrinking |" in card

    config = json.loads((exported / checkpoint.CONFIG).read_text())
    del config["evaluations"][0]["rates"]
    rewrite(exported / checkpoint.CONFIG, config)
    before = contents(exported)
    with pytest.raises(DataError, match=r"not one that lewm wrote \(no 'rates'\)"):
        export_run(debug_run, exported)
    assert contents(exported) == before

    shorter = replace(debug_config, out=tmp_path / "run", train=replace(debug_config.train, steps=2, warmup_steps=1))
    train(shorter)
    assert "Not evaluated yet." in (export_run(tmp_path / "run", exported) / CARD).read_text(), "other weights"


def test_a_card_of_a_method_that_acts_speaks_of_no_plans(debug_config: Config, tmp_path: Path) -> None:
    acting = preset("debug", "gcbc")
    train(replace(debug_config, method=acting.method, train=acting.train, out=tmp_path / "run"))
    out = export_run(tmp_path / "run", tmp_path / "toy")
    run = run_settings(checkpoint.load_document(out), out)
    path = tmp_path / "result.json"
    evaluate(lewm.load(out, "cpu"), replace(run, device="cpu")).save(path, model_files(out))
    card = (export_run(tmp_path / "run", out, [path]) / CARD).read_text()
    assert "Acting with exactly these weights" in card
    assert "| pairs | success | strict success | random | random, strict | solved at start |" in card
    assert not {word for word in ("planner", "replanning", "cem", "horizon", "per plan") if word in card}


def test_figures_of_other_weights_are_refused(exported: Path, debug_run: Path, tmp_path: Path) -> None:
    before = contents(exported)
    of_the_run = evaluation_of(debug_run / "checkpoints" / "step_0000008", tmp_path / "run.json")
    with pytest.raises(DataError, match=r"figures of other weights.*Export first"):
        export_run(debug_run, exported, [of_the_run])
    (tmp_path / "other.json").write_text('{"rates": {}}')
    with pytest.raises(DataError, match="does not hold the results of `lewm eval`"):
        export_run(debug_run, exported, [tmp_path / "other.json"])
    assert contents(exported) == before
    with pytest.raises(DataError, match="other weights"):
        export_run(debug_run, tmp_path / "new", [of_the_run])
    assert not (tmp_path / "new").exists()


@pytest.fixture
def moving(debug_config: Config, debug_run: Path, tmp_path: Path) -> tuple[Path, Path]:
    """A run and the place of its dataset, which may change."""
    assert debug_config.data is not None
    data = Path(shutil.copy(debug_config.data, tmp_path / "data.h5"))
    run = Path(shutil.copytree(debug_run, tmp_path / "run"))
    change_description(run, lambda document: document["run"].update(data=str(data)))
    return run, data


def change_description(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = checkpoint.resolve(run) / checkpoint.CONFIG
    document = json.loads(path.read_text())
    change(document)
    rewrite(path, document)


def before_there_were_records(run: Path) -> None:
    change_description(run, lambda document: document.pop("data"))


def test_a_card_tells_what_was_trained_on_whatever_lies_there_today(moving: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = moving
    first = contents(export_run(run, tmp_path / "toy"))
    assert "| episodes | 8, of " in (tmp_path / "toy" / CARD).read_text()
    data.unlink()
    collect("tworoom", data, CollectConfig(episodes=9, resolution=28, workers=1, exploration=0.5), seed=7)
    assert contents(export_run(run, tmp_path / "other" / "toy")) == first
    data.unlink()
    assert contents(export_run(run, tmp_path / "third" / "toy")) == first


def test_of_an_older_run_only_its_own_dataset_is_described(moving: tuple[Path, Path], tmp_path: Path) -> None:
    run, data = moving
    before_there_were_records(run)
    first = contents(export_run(run, tmp_path / "toy"))
    assert "| episodes | 8, of " in (tmp_path / "toy" / CARD).read_text()
    data.unlink()
    collect("tworoom", data, CollectConfig(episodes=9, resolution=28, workers=1), seed=7)
    assert contents(export_run(run, tmp_path / "toy")) == first, "an earlier export knows"
    assert contents(export_run(tmp_path / "toy", tmp_path / "copies" / "toy")) == first
    assert "dataset | not recorded" in (export_run(run, tmp_path / "elsewhere") / CARD).read_text()
    assert "collect" not in checkpoint.load_document(tmp_path / "elsewhere")["run"]


def test_settings_of_collecting_are_those_of_the_data(debug_config: Config, tmp_path: Path) -> None:
    """Of the run, of its checkpoints and of what is exported, whatever the preset would have collected."""
    data, out = tmp_path / "explored.h5", tmp_path / "run"
    made = CollectConfig(episodes=9, resolution=28, workers=1, exploration=0.5)
    collect("tworoom", data, made)
    train(replace(debug_config, data=data, out=out))
    stored = read_config(read_json(out / "config.json")).collect
    folders = (checkpoint.resolve(out), export_run(out, tmp_path / "toy"))
    told = [run_settings(checkpoint.load_document(folder), folder).collect for folder in folders]
    assert [stored, *told] == [replace(made, workers=0)] * 3
    change_description(out, lambda document: document["run"]["collect"].update(exploration=0.0, episodes=10_000))
    again = export_run(out, tmp_path / "again")
    assert run_settings(checkpoint.load_document(again), again).collect == told[0]


def test_demonstrations_are_told_by_their_content() -> None:
    record = {"episodes": 5, "resolution": 28, "frame_stride": 1, "demonstrations": "abc", "exploration": None}
    settings = collect_settings(record, "A record")
    assert settings == CollectConfig(episodes=5, resolution=28, demos="sha256:abc")
    with pytest.raises(DataError, match="There are no demonstrations at sha256:abc"):
        collect("pusht", "nowhere.h5", settings)
    with pytest.raises(DataError, match=r"A record says what no dataset can be: collect\.episodes must be positive"):
        collect_settings({**record, "episodes": 0}, "A record")


# -- commands -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pusht", "cube", "demo"])
def test_the_command_of_a_training_repeats_it(name: str) -> None:
    base = preset(name)
    changed = replace(
        base,
        seed=3,
        data=Path("data/some file.h5"),
        out=Path("runs/x"),
        train=replace(base.train, steps=77, cuda_graph=False, schedule_steps=900),
        method=replace(base.method, embed_dim=48),
        plan=replace(base.plan, warm_start=True),
    )
    lewm, verb, given, *options = shlex.split(train_command(changed))
    assert (lewm, verb, given) == ("lewm", "train", name)
    args = parse(TrainArgs, options, "train", TrainArgs.like(preset(given), Path("another")))
    assert args.of(base) == replace(changed, plan=base.plan), "how it plans is not for its training to say"


def test_the_command_of_an_evaluation_repeats_it() -> None:
    run = preset("cube")
    plan = replace(run.plan, schedule="receding", warm_start=True, cuda_graph=False)
    config = replace(run, seed=5, plan=plan, eval=replace(run.eval, episodes=200, manifest="strict"))
    _, _, name, *options = shlex.split(eval_command("cube", run, config))
    default = EvalArgs(env=run.env, seed=run.seed, plan=run.plan, eval=run.eval)
    args = parse(EvalArgs, options, "eval", default)
    assert name == "cube"
    assert (args.env, args.seed, args.plan, args.eval) == (config.env, config.seed, config.plan, config.eval)


def test_the_command_of_a_collection_repeats_it() -> None:
    facts = {"environment": "lewm/PushT-v0", "episodes": 20, "resolution": 28, "frame_stride": 5, "seed": 1}
    asked = {**facts, "demonstrations": "abc", "exploration": 0.8, "mistakes": 0.3}
    _, verb, *options = shlex.split(collect_command(asked, Path("data/p.h5")))
    args = parse(CollectArgs, options, verb)
    assert (args.env, args.episodes, args.resolution, args.frame_stride, args.seed) == ("pusht", 20, 28, 5, 1)
    assert (args.demos, args.out, args.exploration, args.mistakes) == ("DEMOS", Path("data/p.h5"), 0.8, 0.3)
    plain = collect_command({**facts, "demonstrations": "", "exploration": 0.0}, None)  # before there were mistakes
    assert "--exploration" not in plain
    assert "--mistakes" not in plain


# -- names --------------------------------------------------------------------------------------------------------


@pytest.fixture
def named(exported: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The exported model as one that comes with lewm, called "toy"; the working directory is an empty folder."""
    shutil.copytree(exported, tmp_path / "package" / "toy")
    (tmp_path / "package" / "unfinished").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.setattr(checkpoint, "PRETRAINED", (tmp_path / "package", tmp_path / "none"))
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "package" / "toy"


def test_models_have_names(named: Path) -> None:
    assert checkpoint.pretrained_models() == {"toy": named}
    assert torch.equal(load("toy").predictor.positions, load(named).predictor.positions)
    assert info.model("toy")["checkpoint"] == str(named)


def test_a_folder_is_preferred_to_a_name(named: Path) -> None:
    LeWM(preset("debug").method).save_pretrained("toy")
    assert checkpoint.resolve("toy") == Path("toy")
    shutil.rmtree("toy")
    assert checkpoint.resolve("toy") == named


def test_an_unknown_name_is_not_looked_for_on_the_network(named: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the network"))
    with pytest.raises(CheckpointError, match=r"Unknown model 'toi'\. Did you mean 'toy'\? Known: toy\."):
        load("toi")
    shutil.rmtree(named)
    with pytest.raises(CheckpointError, match="Unknown model 'toy': none comes with this lewm"):
        load("toy")


def test_the_checkout_is_where_names_are_looked_up() -> None:
    package = Path(checkpoint.__file__).parent
    assert (package / "pretrained", package.parent / "pretrained") == checkpoint.PRETRAINED


def test_evaluating_a_name_writes_here(named: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["eval", "toy", "--device", "cpu", "--eval.episodes", "1"]) == 0
    (results,) = Path("evaluations/toy").iterdir()
    assert f"Results: {results}" in capsys.readouterr().out
    assert not list(named.rglob("*_cem_*.json"))


def test_a_planner_is_named_with_what_it_does_differently() -> None:
    assert _planner(PlanConfig()) == "cem 300×30, 30 elites, horizon 5"
    settings = {"icem": IcemConfig(noise_exponent=2), "init_std": 1.5, "action_limit": 1.0}
    named = _planner(PlanConfig(solver="icem", elites=10, warm_start=True, **settings))
    assert named == (
        "icem 300×30, 10 elites, noise exponent 2, first spread 1.5, horizon 5, actions within ±1, from the last plan"
    )
    recorded = _planner(PlanConfig(solver="icem", icem=IcemConfig(recorded=3, momentum=0.3)))
    first = "3 iterations of recorded actions, noise like these, momentum 0.3"
    assert recorded == f"icem 300×30, 30 elites, {first}, horizon 5"
    assert "momentum" not in _planner(PlanConfig(icem=IcemConfig(momentum=0.3)))  # CEM has none


@pytest.mark.slow
def test_a_script_goes_from_data_to_card_and_does_nothing_twice(tmp_path: Path) -> None:
    places = {"DATA": tmp_path / "tworoom.h5", "RUN": tmp_path / "run", "OUT": tmp_path / "toy"}
    sizes = {"PRESET": "debug", "EPISODES": 12, "RESOLUTION": 28, "STEPS": 4, "EVAL_EPISODES": 2, "EVAL_JOBS": 2}
    environment = os.environ | {name: str(value) for name, value in (places | sizes).items()}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", str(Path(checkpoint.__file__).parents[1] / "runs" / "train_tworoom.sh"), "--device", "cpu"]

    def run() -> str:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run().count("Results: ") == 12
    card = (tmp_path / "toy" / CARD).read_text()
    for schedule in ("whole", "shrinking", "soonest", "receding"):
        assert f"| paper | {schedule} |" in card
    assert card.count("| strict | ") == 4
    assert card.count("noise exponent 1,") == 6
    (tmp_path / "run" / "evaluations" / "paper_soonest_cem_2.json").unlink()
    again = run()
    assert again.count("Results: ") == 1
    assert "collect" not in again
    assert "Continuing" in again
    assert load(tmp_path / "toy").settings == preset("debug").method


def test_the_verb(debug_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "toy"
    assert cli.run(["export", str(debug_run), str(out)]) == 0
    results = [str(evaluation_of(out, tmp_path / f"{name}.json", schedule=name)) for name in ("whole", "receding")]
    assert cli.run(["export", str(debug_run), str(out), "--evaluations", *results]) == 0
    assert "2 evaluations in the card." in capsys.readouterr().out
    card = (out / CARD).read_text()
    assert "| paper | whole |" in card
    assert "| paper | receding |" in card
    assert cli.run(["export", str(debug_run), str(out)]) == 0
    assert capsys.readouterr().out.count("2 evaluations in the card.") == 1
