"""`lewm demo`: the whole pipeline on TwoRoom, in minutes on a CPU, ending in a report.

    OUT/dataset.h5  ->  OUT/training/  ->  OUT/evaluation.json, OUT/report.html

Each stage picks up what an earlier call left, finished or not. The report leads to OUT/understanding/report.html, which
`lewm understand` makes.
"""

from __future__ import annotations

import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from lewm import files
from lewm.cli.collect import collect_with_progress
from lewm.cli.eval import evaluate_with_progress
from lewm.cli.frame import console, parse, print_rates, say
from lewm.cli.progress import training_bar
from lewm.config import Config
from lewm.errors import ConfigError
from lewm.files import PAGE, RESULTS, check_output, read_json
from lewm.presets import preset, read_config

if TYPE_CHECKING:
    from lewm.evaluate.stats import Rate
    from lewm.train.loop import TrainResult

DATASET, TRAINING, EVALUATION, REPORT = "dataset.h5", "training", "evaluation.json", "report.html"
UNDERSTANDING = "understanding"


@dataclass(frozen=True)
class DemoArgs:
    """The whole pipeline on TwoRoom: collect, train, plan, report. A second call reuses what is there."""

    out: Path = Path("runs/demo")  # Where everything goes.
    fresh: bool = False  # Start over.
    seed: int = 0  # Everything random derives from it.


def run(arguments: list[str]) -> None:
    """Run what is missing of it, and print the rates."""
    args = parse(DemoArgs, arguments, "demo")
    print_rates(run_demo(replace(preset("demo"), seed=args.seed), args.out, args.fresh, console))
    say(f"Report: {args.out / REPORT}")
    say(f"What the model has understood: {_understand(args.out)}")


def run_demo(config: Config, out: Path, fresh: bool, console: Console) -> dict[str, Rate]:
    """Run what is missing of the demo; returns the rates of its final table."""
    from lewm.train.loop import train

    check_output(out / REPORT, PAGE)
    check_output(out / EVALUATION, RESULTS)
    if fresh:
        _clear(out)
    dataset = out / DATASET
    config = replace(config, out=out / TRAINING, data=dataset)
    collect_with_progress(config.env, dataset, config.collect, config.seed, console)
    with training_bar(console) as monitor:
        result = train(config, monitor=monitor)
    return _finished_rates(out, config, result.checkpoint) or _evaluate(config, result, out, console)


def _understand(out: Path) -> str:
    """The command that shows what the demo's model has understood, on a page that the report leads to."""
    return shlex.join(["lewm", "understand", str(out / TRAINING), "--out", str(out / UNDERSTANDING)])


def _clear(out: Path) -> None:
    """Remove what a demo wrote, and nothing else; not while another writes it."""
    from lewm.data.collect import collecting
    from lewm.train.run import Run

    if not out.is_dir():
        return
    check_output(out / DATASET, files.DATASET)
    run = Run(out / TRAINING)
    with run.writing(), collecting(out / DATASET):
        if not (run.directory / "config.json").is_file() and any(run.directory.glob("[!.]*")):
            raise ConfigError(f"{run.directory} is no run of a demo; it stays as it is. Choose another folder.")
        for name in (TRAINING, f"{DATASET}.parts", f"{DATASET}.features"):
            shutil.rmtree(out / name, ignore_errors=True)
        for name in (DATASET, EVALUATION, f"{EVALUATION}.partial", REPORT):
            (out / name).unlink(missing_ok=True)


def _finished_rates(out: Path, config: Config, folder: Path) -> dict[str, Rate] | None:
    """The rates of an evaluation that an earlier call finished with this configuration, if its report is there too.

    folder: of the model's files, which must be what was evaluated.
    """
    from lewm.evaluate.results import model_files, read_rates

    if not (out / EVALUATION).is_file():
        return None
    document = read_json(out / EVALUATION)
    # Not compared as it stands in the file: a setting that did not exist yet had the value that is now the default.
    if read_config(document.get("config")) != config:
        raise ConfigError(f"{out} holds a demo with other settings. Start over with `lewm demo --fresh`.")
    then, now = document.get("checkpoint") or {}, model_files(folder)
    if then.get("weights_sha256") != now["weights_sha256"]:
        problem = f"{out / EVALUATION} has the rates of another model than {folder}"
        raise ConfigError(f"{problem}. Remove it to evaluate this one, or start over with `lewm demo --fresh`.")
    return read_rates(out / EVALUATION) if (out / REPORT).is_file() else None


def _evaluate(config: Config, result: TrainResult, out: Path, console: Console) -> dict[str, Rate]:
    from lewm.evaluate.question import ask
    from lewm.evaluate.report import write_report
    from lewm.evaluate.runner import evaluate
    from lewm.train.logs import read_metrics

    model, results, evaluation = result.model, out / EVALUATION, None
    if not results.is_file():
        evaluation = evaluate_with_progress(model, config, ask(model, config), results, result.checkpoint, console)
    evaluation = evaluation or evaluate(model, config)  # only the report was missing, which shows what happened
    parameters = sum(p.numel() for p in model.parameters())
    summary = {
        "Environment": config.env,
        "Model": f"{config.method.NAME}, {parameters:,} parameters",
        "Training": f"{result.steps} steps of {config.train.batch_size} windows on {model.device}",
        "Checkpoint": str(result.checkpoint),
    }
    understanding = f"{UNDERSTANDING}/report.html", _understand(out)
    write_report(out / REPORT, evaluation, read_metrics(result.directory / "metrics.jsonl"), summary, understanding)
    return evaluation.rates()
