"""Whatever a file or a flag says, it is checked in one place: one line, nothing written, a status that is not 0."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lewm import checkpoint
from lewm.checked import to_dict
from lewm.config import Config
from lewm.errors import ConfigError
from lewm.files import json_digest
from lewm.presets import preset, read_config
from lewm.retired import put

Lewm = Callable[..., Any]  # the fixture: arguments -> what came of it
NAN, INFINITY = float("nan"), float("inf")
# For what should be refused and is not.
QUICKLY = ("--device=cpu", "--eval.episodes=1", "--plan.samples=4", "--plan.elites=2", "--plan.iterations=1")

# Of a run, by dotted name: what JSON can say and no run can have.
OF_METHOD: list[tuple[str, Any]] = [
    ("method", 3),
    ("method", None),
    ("method", []),
    ("method", "lewm"),
    ("method.name", "lwm"),
    ("method.name", 5),
    ("method.name", None),
    ("method.name", ["lewm"]),
    ("method.encoder", 3),
    ("method.encoder", []),
    ("method.encoder", None),
    ("method.encoder.kind", "resnet"),
    ("method.encoder.kind", 14),
    ("method.encoder.kind", None),
    ("method.encoder.kind", True),
    ("method.encoder.image_size", 0),
    ("method.encoder.image_size", 29),
    ("method.encoder.image_size", 28.0),
    ("method.encoder.image_size", "28"),
    ("method.encoder.image_size", 14 * 10**6),
    ("method.encoder.patch_size", -14),
    ("method.encoder.depth", 0),
    ("method.encoder.depth", 10**9),
    ("method.encoder.depth", [1]),
    ("method.encoder.heads", 3),
    ("method.encoder.width", 10**30),
    ("method.encoder.kept_patches", -1),
    ("method.encoder.kept_patches", 5),
    ("method.encoder.background_noise", NAN),
    ("method.encoder.dept", 1),
    ("method.encoder.encoder", {"depth": 1}),
    ("method.predictor", {"predictor": {"depth": 1}}),
    ("method.predictor.dropout", 1.0),
    ("method.predictor.dropout", NAN),
    ("method.predictor.dropout", "0.1"),
    ("method.predictor.heads", -2),
    ("method.embed_dim", 0),
    ("method.embed_dim", 8.5),
    ("method.embed_dim", 10**9),
    ("method.history", 0),
    ("method.history", True),
    ("method.frame_skip", -5),
    ("method.frame_skip", 10**8),
    ("method.action_dim", 0),
    ("method.sigreg", 0.09),
    ("method.sigreg.weight", -0.1),
    ("method.sigreg.weight", INFINITY),
    ("method.sigreg.weight", {"value": 1}),
    ("method.sigreg.knots", 1),
    ("method.sigreg.directions", 10**9),
]
OF_RUN: list[tuple[str, Any]] = [
    ("seed", -1),
    ("seed", 1.5),
    ("seed", "0"),
    ("seed", True),
    ("seed", 2**63),
    ("env", 5),
    ("env", None),
    ("device", 0),
    ("data", 7),
    ("out", {"folder": "x"}),
    ("sede", 1),
    ("train", 3),
    ("train", []),
    ("train", None),
    ("train", "quickly"),
    ("train.steps", 0),
    ("train.steps", 10.5),
    ("train.steps", "10"),
    ("train.steps", True),
    ("train.steps", NAN),
    ("train.steps", 10**30),
    ("train.steps", {"train": 8}),
    ("train.stepz", 8),
    ("train.batch_size", 1),
    ("train.batch_size", 10**8),
    ("train.lr", NAN),
    ("train.lr", INFINITY),
    ("train.lr", -INFINITY),
    ("train.lr", 0.0),
    ("train.lr", 1e30),
    ("train.lr", "1e-3"),
    ("train.lr", True),
    ("train.optimizer", "sgd"),
    ("train.optimizer", 1),
    ("train.precision", 16),
    ("train.precision", None),
    ("train.compile", False),
    ("train.cuda_graph", 1),
    ("train.weight_decay", -1.0),
    ("train.final_lr_fraction", 1.5),
    ("train.schedule_steps", 0),
    ("train.calibration_batches", -1),
    ("train.checkpoint_every", 0),
    ("loader.val_fraction", 1.0),
    ("loader.val_fraction", [0.1]),
    ("loader.cache", "tape"),
    ("loader.cache", 3),
    ("loader.threads", 10**6),
    ("loader.split_seed", 5),
    ("train.ema", 0.9),
]
OF_PLANNING: list[tuple[str, Any]] = [
    ("plan", [1]),
    ("plan.solver", "cme"),
    ("plan.solver", 3),
    ("plan.schedule", None),
    ("plan.horizon", 0),
    ("plan.horizon", 10**8),
    ("plan.samples", 10**8),
    ("plan.elites", 9),
    ("plan.icem", 0.5),
    ("plan.icem.recorded", -1),
    ("plan.icem.momentum", NAN),
    ("plan.budget_ms", INFINITY),
    ("plan.action_limit", -1.0),
    ("plan.cuda_graph", "yes"),
    ("eval.episodes", 0),
    ("eval.episodes", 2.5),
    ("eval.budget", 10**9),
    ("eval.manifest", 5),
    ("eval.workers", -1),
    ("collect.episodes", -1),
    ("collect.exploration", 1.0),
    ("collect.demos", 5),
]
BAD = [*OF_METHOD, *OF_RUN, *OF_PLANNING]


def with_value(document: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A copy of a document in which one setting has another value."""
    copied: dict[str, Any] = json.loads(json.dumps(document))
    put(copied, name, value)
    return copied


def named(entries: list[tuple[str, Any]]) -> Any:
    return pytest.mark.parametrize(("name", "value"), entries, ids=[f"{name}={value}" for name, value in entries])


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def assert_one_line(answer: Any) -> None:
    """What the fixture has made single is one sentence or a few, behind a single "Error:"."""
    answer.assert_refused()
    assert answer.err.count("Error") == 1


def test_there_are_enough_of_them():
    assert len(BAD) > 100
    assert len(OF_METHOD) >= 50


@named(BAD)
def test_none_of_them_is_a_runs(name: str, value: Any):
    """However it came to be there, and whatever else the run is compared with."""
    with pytest.raises(ConfigError) as refusal:
        read_config(with_value(to_dict(preset("debug")), name, value))
    assert "\n" not in str(refusal.value)


# -- a run ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run, whose config.json tests change."""
    return Path(shutil.copytree(debug_run, tmp_path_factory.mktemp("bad") / "run"))


@named(BAD)
def test_a_run_is_not_continued(lewm: Lewm, run: Path, debug_config: Config, name: str, value: Any):
    path = run / "config.json"
    whole = path.read_text()
    path.write_text(json.dumps(with_value(json.loads(whole), name, value)))
    before = files_below(run)
    answer = lewm("train", "debug", "--data", debug_config.data, "--out", run, "--device", "cpu")
    assert_one_line(answer)
    assert files_below(run) == before
    path.write_text(whole)


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "null", '"text"', "{", '{"seed": 1e999}', "[" * 100_000, '{"a": "\\ud800"}']
)
def test_a_run_whose_description_is_something_else_is_not_continued(
    lewm: Lewm, run: Path, debug_config: Config, text: str
):
    path = run / "config.json"
    whole = path.read_text()
    path.write_text(text)
    before = files_below(run)
    answer = lewm("train", "debug", "--data", debug_config.data, "--out", run, "--device", "cpu")
    assert_one_line(answer)
    assert files_below(run) == before
    path.write_text(whole)


# -- a model -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(debug_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run's checkpoint, whose config.json tests change."""
    folder = debug_run / "checkpoints" / "step_0000008"
    return Path(shutil.copytree(folder, tmp_path_factory.mktemp("bad") / "model"))


def describe(folder: Path, document: dict[str, Any]) -> None:
    """Make a document the description of a model, with the digest that belongs to it."""
    document = {name: value for name, value in document.items() if name != "digest"}
    (folder / checkpoint.CONFIG).write_text(json.dumps(document | {"digest": json_digest(document)}))


@pytest.fixture
def description(model: Path) -> Any:
    """What the model's config.json says; it is put back."""
    whole = (model / checkpoint.CONFIG).read_text()
    yield json.loads(whole)
    (model / checkpoint.CONFIG).write_text(whole)


@named(OF_METHOD)
def test_a_model_is_not_loaded(lewm: Lewm, model: Path, description: dict[str, Any], name: str, value: Any):
    describe(model, with_value(description, name, value))
    before = files_below(model)
    for verb in (("info", model), ("eval", model, *QUICKLY), ("export", model, model.with_name("out"))):
        assert_one_line(lewm(*verb))
    assert files_below(model.parent) == before


@named([(name, value) for name, value in OF_RUN + OF_PLANNING if name not in ("loader.split_seed", "train.ema")])
def test_a_model_of_such_a_run_is_not_evaluated(
    lewm: Lewm, model: Path, description: dict[str, Any], name: str, value: Any
):
    """Settings that are gone are no reason: they do not change what the model is."""
    describe(model, with_value(description, f"run.{name}", value))
    before = files_below(model)
    assert_one_line(lewm("eval", model, *QUICKLY))
    assert files_below(model.parent) == before


def as_written_by_0_1(document: dict[str, Any]) -> dict[str, Any]:
    """The same description in the first format, which has no digest that would tell."""
    method = {name: value for name, value in document["method"].items() if name not in ("name", "sigreg")}
    del method["encoder"]["kind"]
    return {
        "format": "lewm",
        "format_version": 1,
        "lewm_version": "0.1.0",
        "weights_sha256": document["files"][checkpoint.WEIGHTS],
        "actions_sha256": document["files"][checkpoint.ACTIONS],
        "model": method,
        "action_stats": document["facts"]["actions"],
        "training": document["training"],
        "run": {"sigreg": document["method"]["sigreg"]},
    }


def test_the_first_format_is_read(lewm: Lewm, model: Path, description: dict[str, Any]):
    (model / checkpoint.CONFIG).write_text(json.dumps(as_written_by_0_1(description)))
    answer = lewm("info", model)
    assert (answer.status, answer.err) == (0, "")
    assert "written by lewm 0.1.0, format 1" in answer.out


def of_the_first_format(name: str) -> str:
    """What the first format called a setting of the method."""
    if name.startswith("method.sigreg"):
        return name.replace("method.sigreg", "run.sigreg")
    return name.replace("method", "model")


@pytest.mark.parametrize(
    ("name", "value"),
    [pytest.param(name, value, id=f"{name}={value}") for name, value in OF_METHOD if name != "method"],
)
def test_a_model_of_the_first_format_is_not_loaded(
    lewm: Lewm, model: Path, description: dict[str, Any], name: str, value: Any
):
    document = with_value(as_written_by_0_1(description), of_the_first_format(name), value)
    (model / checkpoint.CONFIG).write_text(json.dumps(document))
    assert_one_line(lewm("info", model))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", 3),
        ("model", None),
        ("run", [1]),
        ("run", 3),
        ("action_stats", 3),
        ("action_stats", {"mean": [0.1, 0.2]}),
        ("action_stats", {"mean": 3, "std": 3}),
        ("action_stats", {"mean": [0.1, NAN], "std": [1.0, 1.0]}),
        ("action_stats", {}),
        ("action_stats", {"mean": ["a", "b"], "std": [1.0, 1.0]}),
        ("action_stats", {"mean": [0.1, 0.2], "std": [1.0, 0.0]}),
        ("action_stats", {"mean": [0.1], "std": [1.0]}),
        ("environment", 5),
        ("training", 3),
        ("data", 3),
    ],
)
def test_other_sections_of_the_first_format_are_checked_as_well(
    lewm: Lewm, model: Path, description: dict[str, Any], name: str, value: Any
):
    document = with_value(as_written_by_0_1(description), name, value)
    (model / checkpoint.CONFIG).write_text(json.dumps(document))
    assert_one_line(lewm("eval", model, *QUICKLY))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("format", 3),
        ("format_version", "2"),
        ("format_version", None),
        ("format_version", 2.0),
        ("files", {}),
        ("files", {"model.safetensors": 3}),
        ("facts.actions", 3),
        ("files", None),
        ("files", []),
        ("facts", None),
        ("facts", []),
        ("facts", {}),
        ("facts.actions", {}),
        ("facts.actions.mean", ["a", "b"]),
        ("facts.actions.mean", [NAN, 1.0]),
        ("facts.actions.std", [1.0, 0.0]),
        ("facts.actions.mean", [1.0]),
        ("facts.episodes", "many"),
        ("facts.environment", 5),
        ("facts.dataset", 5),
        ("run", None),
        ("run", []),
        ("run", 3),
    ],
)
def test_other_sections_are_checked_as_well(
    lewm: Lewm, model: Path, description: dict[str, Any], name: str, value: Any
):
    """Their digest is right: somebody else has written them."""
    describe(model, with_value(description, name, value))
    before = files_below(model)
    for verb in (("info", model), ("eval", model, *QUICKLY)):
        assert_one_line(lewm(*verb))
    assert files_below(model) == before


@pytest.mark.parametrize("name", ["format", "format_version", "digest", "method", "facts", "files"])
def test_sections_that_are_missing_are_noticed(lewm: Lewm, model: Path, description: dict[str, Any], name: str):
    del description[name]
    if name == "digest":
        (model / checkpoint.CONFIG).write_text(json.dumps(description))
    else:
        describe(model, description)
    for verb in (("info", model), ("eval", model, *QUICKLY)):
        assert_one_line(lewm(*verb))


# -- flags ---------------------------------------------------------------------------------------------------------

TRAINING = [
    "--seed=-1",
    "--seed=1.5",
    f"--seed={2**63}",
    "--seed=nought",
    "--device=gpu",
    "--device=",
    "--env=",
    "--env=mars",
    "--method=",
    "--method=lwm",
    "--resume=always",
    "--method.encoder.kind=resnet",
    "--method.encoder.image-size=0",
    "--method.encoder.image-size=29",
    "--method.encoder.image-size=28.5",
    f"--method.encoder.image-size={14 * 10**6}",
    "--method.encoder.depth=0",
    f"--method.encoder.depth={10**30}",
    "--method.encoder.heads=3",
    "--method.encoder.kept-patches=-1",
    "--method.encoder.kept-patches=5",
    "--method.encoder.background-noise=nan",
    "--method.predictor.dropout=1",
    "--method.predictor.dropout=-inf",
    "--method.embed-dim=0",
    f"--method.embed-dim={10**9}",
    "--method.history=0",
    "--method.frame-skip=-5",
    "--method.action-dim=0",
    "--method.sigreg.weight=-0.1",
    "--method.sigreg.weight=inf",
    "--method.sigreg.knots=1",
    f"--method.sigreg.directions={10**9}",
    "--method.sigreg.t-max=3",
    "--train.steps=0",
    "--train.steps=10.5",
    f"--train.steps={10**30}",
    "--train.batch-size=1",
    f"--train.batch-size={10**8}",
    "--train.lr=nan",
    "--train.lr=inf",
    "--train.lr=0",
    "--train.lr=1e30",
    "--train.lr=fast",
    "--train.optimizer=sgd",
    "--train.precision=mixed",
    "--train.compile=max-autotune",
    "--train.weight-decay=-1",
    "--train.clip-norm=0",
    "--train.warmup-steps=-1",
    "--train.final-lr-fraction=1.5",
    "--train.schedule-steps=0",
    "--train.calibration-batches=-1",
    "--train.checkpoint-every=0",
    "--train.ema=0.9",
    "--loader.val-fraction=1",
    "--loader.val-fraction=nan",
    "--loader.cache=tape",
    "--loader.threads=0",
    "--loader.split-seed=3",
    "--model.embed-dim=8",
    "--sigreg.weight=1",
]


@pytest.mark.parametrize("flag", TRAINING)
def test_a_flag_that_no_run_can_have_starts_none(lewm: Lewm, tmp_path: Path, debug_config: Config, flag: str):
    answer = lewm("train", "debug", f"--data={debug_config.data}", f"--out={tmp_path / 'run'}", "--device=cpu", flag)
    assert_flag_refused(answer, flag)
    assert list(tmp_path.iterdir()) == []


def assert_flag_refused(answer: Any, flag: str) -> None:
    """By lewm in one line, or by tyro, which draws a box around it if a value is not even of the right type."""
    assert answer.status in (1, 2)
    assert "Traceback" not in answer.err
    assert answer.out == ""
    if answer.status == 1:
        assert_one_line(answer)
    else:
        assert flag.partition("=")[0] in answer.err


@pytest.mark.parametrize(
    "flag",
    [
        "--seed=-1",
        f"--seed={2**70}",
        "--env=mars",
        "--device=gpu",
        "--videos=-1",
        "--videos=many",
        "--solver=cme",
        "--manifest=no/such.json",
        "--fixed-flops=-5",
        "--fixed-flops=nan",
        "--fixed-flops=inf",
        "--plan.solver=cme",
        "--plan.schedule=sonest",
        "--plan.horizon=0",
        f"--plan.horizon={10**8}",
        f"--plan.samples={10**8}",
        "--plan.elites=9",
        "--plan.iterations=-1",
        "--plan.init-std=nan",
        "--plan.icem.recorded=-1",
        "--plan.icem.momentum=1",
        "--plan.mppi.temperature=0",
        "--plan.gradient.restarts=0",
        "--plan.budget-ms=inf",
        "--plan.action-limit=-1",
        "--plan.batch-size=0",
        "--plan.recorded=3",
        "--eval.episodes=0",
        "--eval.episodes=2.5",
        "--eval.budget=0",
        f"--eval.budget={10**9}",
        "--eval.workers=-1",
    ],
)
def test_a_flag_that_no_evaluation_can_have_starts_none(lewm: Lewm, debug_run: Path, tmp_path: Path, flag: str):
    answer = lewm("eval", debug_run, "--device=cpu", f"--out={tmp_path / 'result.json'}", flag)
    assert_flag_refused(answer, flag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flag",
    [
        "--seed=-1",
        f"--seed={2**70}",
        "--episodes=0",
        f"--episodes={10**9}",
        "--resolution=0",
        "--resolution=10000",
        "--workers=-1",
        "--frame-stride=0",
        "--exploration=1",
        "--exploration=nan",
        "--mistakes=-0.1",
        "--mistakes=0.5",
        "--demos=nowhere",
    ],
)
def test_a_flag_that_no_collection_can_have_starts_none(lewm: Lewm, tmp_path: Path, flag: str):
    small = ("--episodes=1", "--resolution=28", "--workers=1")
    answer = lewm("collect", "tworoom", f"--out={tmp_path / 'new' / 'data.h5'}", *small, flag)
    assert_flag_refused(answer, flag)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "flag"),
    [
        ("convert", "--resolution=0"),
        ("convert", "--resolution=-5"),
        ("convert", "--resolution=2.5"),
        ("convert", "--to=video"),
        ("show", "--episode=-1"),
        ("show", "--episode=999"),
        ("show", "--fps=0"),
        ("show", "--fps=-3"),
    ],
)
def test_a_flag_that_makes_no_sense_for_a_dataset_does_nothing(
    lewm: Lewm, tmp_path: Path, debug_config: Config, verb: str, flag: str
):
    target = tmp_path / "new.h5" if verb == "convert" else f"--out={tmp_path / 'film.gif'}"
    assert_flag_refused(lewm("data", verb, debug_config.data, target, flag), flag)
    assert list(tmp_path.iterdir()) == []


def at_most_eight_gigabytes() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))


def test_sizes_that_are_absurd_only_together(debug_config: Config, tmp_path: Path):
    """Each is allowed; the layer between them has 17 GB."""
    sizes = ("--method.embed-dim=65536", "--method.projector-width=65536")
    command = [sys.executable, "-m", "lewm", "train", "debug", f"--data={debug_config.data}", "--device=cpu", *sizes]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    limited = {"preexec_fn": at_most_eight_gigabytes, "env": environment, "cwd": tmp_path}
    done = subprocess.run(command, **limited, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("Error: ")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
