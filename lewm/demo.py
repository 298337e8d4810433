"""`lewm demo`: the whole pipeline on TwoRoom, in minutes on a CPU, ending in a report.

    OUT/dataset.h5  ->  OUT/training/  ->  OUT/evaluation.json, OUT/report.html

Each stage picks up what an earlier call left, finished or not.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from lewm.config import CollectConfig, Config
from lewm.data.collect import collect
from lewm.errors import ConfigError
from lewm.evaluate.answer import answering
from lewm.evaluate.question import Question, ask
from lewm.evaluate.report import write_report
from lewm.evaluate.results import Evaluation, model_files, read_rates
from lewm.evaluate.runner import evaluate
from lewm.evaluate.stats import Rate
from lewm.files import read_json
from lewm.model.world_model import LeWM
from lewm.progress import progress_bar, training_bar
from lewm.retired import read_config
from lewm.train.logs import read_metrics
from lewm.train.loop import TrainResult, train

DATASET, TRAINING, EVALUATION, REPORT = "dataset.h5", "training", "evaluation.json", "report.html"


def run_demo(config: Config, out: Path, fresh: bool, console: Console) -> dict[str, Rate]:
    """Run what is missing of the demo; returns the rates of its final table."""
    if fresh:
        _clear(out)
    dataset = out / DATASET
    config = replace(config, out=out / TRAINING, data=dataset)
    collect_with_progress(config.env, dataset, config.collect, config.seed, console)
    with training_bar(console) as monitor:
        result = train(config, monitor=monitor)
    if result.interrupted:
        raise KeyboardInterrupt
    return _finished_rates(out, config) or _evaluate(config, result, out, console)


def collect_with_progress(env: str, out: Path, settings: CollectConfig, seed: int, console: Console) -> None:
    """Collect a dataset behind a progress bar, and say what came of it."""
    started = time.monotonic()
    with progress_bar(console, "collect") as on_progress:
        sizes = (settings.episodes, settings.resolution, seed, settings.workers)
        content = (settings.frame_stride, settings.demos, settings.exploration, settings.mistakes)
        report = collect(env, out, *sizes, on_progress, *content)
    rate = report.frames * report.new_episodes / report.episodes / (time.monotonic() - started)
    counts = f"{report.episodes:,} episodes ({report.new_episodes:,} new), {report.frames:,} frames"
    speed = f", {rate:,.0f} frames/s" if report.new_episodes else ""
    console.print(f"{report.path}: {counts}, {report.gb_per_million_frames:.2f} GB per million{speed}", markup=False)
    console.print(f"{report.successes:,} of {report.episodes:,} episodes reached their goal", markup=False)


def evaluate_with_progress(
    model: LeWM, config: Config, question: Question, out: Path, folder: Path, console: Console
) -> Evaluation | None:
    """Evaluate behind a progress bar, from where an interrupted call stopped; the results go to the file ``out``.

    folder: of the model's files. None if the results of this question are there already.
    """
    with answering(out, question) as journal:
        if journal is None:
            return None
        if journal.earlier:
            console.print(f"Going on from {journal.path}: {journal.earlier:,} plans are there.", markup=False)
        files = model_files(folder)
        with progress_bar(console, "plan") as on_progress:
            evaluation = evaluate(model, config, on_progress, journal)
        evaluation.save(out, files, question)
        journal.remove()
    return evaluation


def _clear(out: Path) -> None:
    """Remove what a demo wrote, and nothing else."""
    for path in out.glob(f"{DATASET}*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    shutil.rmtree(out / TRAINING, ignore_errors=True)
    for name in (EVALUATION, f"{EVALUATION}.partial", REPORT):
        (out / name).unlink(missing_ok=True)


def _finished_rates(out: Path, config: Config) -> dict[str, Rate] | None:
    """The rates of an evaluation that an earlier call finished with this configuration, if its report is there too."""
    if not (out / EVALUATION).is_file():
        return None
    document = read_json(out / EVALUATION)
    # Not compared as it stands in the file: a setting that did not exist yet had the value that is now the default.
    if read_config(document["config"]) != config:
        raise ConfigError(f"{out} holds a demo with other settings. Start over with `lewm demo --fresh`.")
    return read_rates(out / EVALUATION) if (out / REPORT).is_file() else None


def _evaluate(config: Config, result: TrainResult, out: Path, console: Console) -> dict[str, Rate]:
    model, results, evaluation = result.model, out / EVALUATION, None
    if not results.is_file():
        evaluation = evaluate_with_progress(model, config, ask(model, config), results, result.checkpoint, console)
    evaluation = evaluation or evaluate(model, config)  # only the report was missing, which shows what happened
    parameters = sum(p.numel() for p in model.parameters())
    summary = {
        "Environment": config.env,
        "Model": f"{parameters:,} parameters, embedding of {config.model.embed_dim} numbers",
        "Training": f"{result.steps} steps of {config.train.batch_size} windows on {model.device}",
        "Checkpoint": str(result.checkpoint),
    }
    write_report(out / REPORT, evaluation, read_metrics(result.directory / "metrics.jsonl"), summary)
    return evaluation.rates()
