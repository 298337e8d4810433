"""The command line: `lewm VERB ...`. Heavy imports live inside the verbs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lewm.config import PRESETS, CollectConfig, Config, EvalConfig, PlanConfig, SolverName, preset
from lewm.errors import ConfigError, DataError, LewmError, unknown_name
from lewm.retired import advice, read_config
from lewm.version import __version__

if TYPE_CHECKING:
    from lewm.evaluate.stats import Rate

T = TypeVar("T")
console = Console(highlight=False, soft_wrap=True)


# -- verbs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DemoArgs:
    """The whole pipeline on TwoRoom: collect, train, plan, report. A second call reuses what is there."""

    out: Path = Path("runs/demo")  # Where everything goes.
    fresh: bool = False  # Start over.
    seed: int = 0  # Everything random derives from it.


def demo(arguments: list[str]) -> None:
    """Collect, train, plan and report on TwoRoom, in minutes on a CPU"""
    args = _parse(DemoArgs, arguments, "demo")
    from lewm.demo import REPORT, run_demo

    _print_rates(run_demo(replace(preset("demo"), seed=args.seed), args.out, args.fresh, console))
    _say(f"Report: {args.out / REPORT}")


@dataclass(frozen=True, kw_only=True)
class CollectArgs(CollectConfig):
    """Generate a dataset with an environment's expert. The same command resumes; more episodes append."""

    env: tyro.conf.Positional[str]  # The environment; `lewm envs` lists them.
    out: Path | None = None  # The dataset file; None: data/ENV.h5.
    seed: int = 0  # Each episode is a function of this seed and its number.


def collect(arguments: list[str]) -> None:
    """Generate a dataset with an environment's expert"""
    args = _parse(CollectArgs, arguments, "collect")
    from lewm.demo import collect_with_progress

    collect_with_progress(args.env, args.out or Path("data") / f"{args.env}.h5", args, args.seed, console)


@dataclass(frozen=True)
class TrainArgs:
    """Train a world model. Every setting of the preset can be changed; the values shown are the preset's."""

    config: Annotated[Config, tyro.conf.arg(name="")] = field(default_factory=Config)
    resume: Literal["auto", "never"] = "auto"  # auto: continue the run in --out, if there is one.


def train(arguments: list[str]) -> None:
    """Train a world model on a dataset"""
    name, rest = _take_positional(arguments, "train", "PRESET", f"one of {', '.join(PRESETS)}")
    # Not runs/PRESET: `lewm demo` keeps a dataset and a report in runs/demo, beside a run of its own.
    default = TrainArgs(replace(preset(name), out=Path("runs") / f"train_{name}"))
    args = _parse(TrainArgs, rest, f"train {name}", default)
    from lewm.envs.registry import env_entry
    from lewm.progress import training_bar
    from lewm.train import loop
    from lewm.train.distributed import launched_rank

    config = replace(args.config, env=env_entry(args.config.env).gym_id)
    if launched_rank() > 0:
        _train_along(config, args.resume, launched_rank())
        return
    with training_bar(console) as monitor:
        result = loop.train(config, args.resume, monitor)
    _say(f"{result.steps} steps; checkpoint: {result.checkpoint}")
    if result.interrupted:
        raise KeyboardInterrupt


def _train_along(config: Config, resume: str, rank: int) -> None:
    """A process of several that is not the first, which speaks for all: quiet but for errors of its own."""
    from lewm.train import loop

    try:
        result = loop.train(config, resume)
    except LewmError as error:
        raise type(error)(f"Process {rank}: {error}") from error
    if result.interrupted:
        raise SystemExit(130)


@dataclass(frozen=True)
class EvalArgs:
    """Plan to the goals of an environment's frozen manifest. Defaults come from the checkpoint's own run."""

    env: str = Config.env  # The environment to plan in.
    manifest: str | None = None  # Short for --eval.manifest.
    solver: SolverName | None = None  # Short for --plan.solver.
    tuned: bool = False  # Plan as was best for the environment's trained model; --plan.X still counts.
    fixed_flops: float | None = None  # Choose plan.iterations so that a plan takes at most so much arithmetic.
    # Where to write the results as JSON; None: named by what is asked, in RUN/evaluations/STEP for a run's checkpoint,
    # in evaluations/MODEL here for other models.
    out: Path | None = None
    videos: int = 0  # Show so many episodes as GIFs, in a folder beside the results.
    seed: int = 0  # Of the planner's random streams.
    device: str = "auto"  # auto: cuda, then mps, then cpu.
    plan: PlanConfig = field(default_factory=PlanConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.videos <= self.eval.episodes:
            raise ConfigError(f"videos must be between 0 and eval.episodes ({self.eval.episodes}), got {self.videos}.")


def evaluate(arguments: list[str]) -> None:
    """Measure how often planning reaches an environment's frozen goals"""
    source, rest = _take_positional(arguments, "eval", "CHECKPOINT", "a model or run folder, a name or a hub id")
    from lewm import checkpoint
    from lewm.demo import evaluate_with_progress
    from lewm.envs.registry import env_entry
    from lewm.evaluate import animation, flops
    from lewm.evaluate.question import ask
    from lewm.evaluate.results import read_rates
    from lewm.evaluate.runner import evaluate as evaluate_again
    from lewm.files import RESULTS, check_output
    from lewm.model.world_model import LeWM
    from lewm.plan.tuned import tuned_plan

    folder = checkpoint.resolve(source)
    lost: list[str] = []
    run = read_config(checkpoint.load_document(folder).get("run", {}), lost)
    for sentence in lost:
        _say(f"Of this model's run: {sentence}")
    default = EvalArgs(env=run.env, seed=run.seed, plan=run.plan, eval=run.eval)
    args = _parse(EvalArgs, rest, f"eval {source}", default)
    if args.tuned:  # other defaults, so what was asked for is read again
        tuned = tuned_plan(env_entry(args.env).name, run.plan)
        args = _parse(EvalArgs, rest, f"eval {source}", replace(default, plan=tuned))
    plan = replace(args.plan, solver=args.solver) if args.solver else args.plan
    settings = replace(args.eval, manifest=args.manifest) if args.manifest else args.eval
    if args.out:
        check_output(args.out, RESULTS, [folder, *([Path(settings.manifest)] if settings.manifest else [])])
    model = LeWM.from_pretrained(folder, args.device)
    if args.fixed_flops is not None:
        plan = flops.with_fixed_flops(model.config, plan, args.fixed_flops)
        spent = plan.iterations * flops.iteration_flops(model.config, plan)
        _say(f"{plan.iterations} iterations of {plan.solver}: {spent:.2e} floating-point operations per plan.")
    config = replace(run, env=args.env, seed=args.seed, device=args.device, plan=plan, eval=settings)
    question = ask(model, config)
    out = args.out or question.place(source, folder)
    evaluation = evaluate_with_progress(model, config, question, out, folder, console)
    if evaluation is None:
        _say("This very question was answered before; nothing is done again.")
    _print_rates(read_rates(out))
    _say(f"Results: {out}")
    if args.videos:
        few = replace(config, eval=replace(config.eval, episodes=args.videos))
        shown = evaluation or evaluate_again(model, few)  # results do not say what was seen
        videos = out.with_name(f"{out.stem}_videos")
        animation.write_videos(videos, config.env, shown.results[: args.videos])
        _say(f"Videos: {videos}")


@dataclass(frozen=True)
class ExportArgs:
    """Make of a run a small folder to publish: bf16 weights, description and a model card. Repeat it as you like."""

    run: tyro.conf.Positional[str]  # A run folder: its newest checkpoint; or any model folder.
    out: tyro.conf.Positional[Path]  # The folder to write; what else is in it stays.
    evaluations: tuple[Path, ...] = ()  # Results of `lewm eval OUT`, for the card; they join those that it has.


def export(arguments: list[str]) -> None:
    """Write a run's model for others: bf16 weights and a model card"""
    args = _parse(ExportArgs, arguments, "export")
    from lewm import checkpoint
    from lewm.export.writer import export_run

    out = export_run(args.run, args.out, args.evaluations)
    size, evaluations = (out / checkpoint.WEIGHTS).stat().st_size / 1e6, checkpoint.load_document(out)["evaluations"]
    _say(f"Exported to {out}: {size:.1f} MB of weights, {len(evaluations)} evaluations in the card.")


@dataclass(frozen=True)
class CompareArgs:
    """Compare two evaluations of the same pairs, episode by episode."""

    first: tyro.conf.Positional[Path]  # Results that `lewm eval` wrote.
    second: tyro.conf.Positional[Path]  # Others, of the same pairs.


def compare(arguments: list[str]) -> None:
    """Say whether one evaluation is better than another, or just luckier"""
    args = _parse(CompareArgs, arguments, "compare")
    from lewm.evaluate import results

    table = Table("", "first", "second", "only first", "only second", "p", box=None, header_style="bold")
    for protocol, found in results.compare(args.first, args.second).items():
        rates = (f"{100 * rate.value:.1f} % ({rate.successes}/{rate.total})" for rate in (found.first, found.second))
        table.add_row(protocol, *rates, str(found.only_first), str(found.only_second), f"{found.p_value:.3g}")
    console.print(table)
    _say("p: how often luck alone would divide the episodes that only one of them solved as unevenly (McNemar, exact).")


@dataclass(frozen=True)
class InfoArgs:
    """Say what a checkpoint, a run or a dataset holds."""

    path: tyro.conf.Positional[str]  # A model folder, a run folder, a model's name, a hub id or a dataset file.


def info(arguments: list[str]) -> None:
    """Say what a checkpoint, a run or a dataset holds"""
    args = _parse(InfoArgs, arguments, "info")
    from lewm import describe

    is_dataset = args.path.endswith((".h5", ".hdf5")) or Path(args.path).is_file()
    rows = describe.dataset(Path(args.path)) if is_dataset else describe.model(args.path)
    _print_grid((f"[bold]{name}[/]", escape(value)) for name, value in rows.items())


def envs(arguments: list[str]) -> None:
    """List the environments"""
    if arguments:
        raise ConfigError(f"usage: lewm envs; it takes no arguments, got {' '.join(arguments)}.")
    from lewm.envs.registry import env_entry, env_names

    entries = [env_entry(name) for name in env_names()]
    _print_grid((f"[bold]{e.name}[/]", e.gym_id, f"{e.action_dim} actions", e.description) for e in entries)


@dataclass(frozen=True)
class ImportArgs:
    """Convert the authors' weights.pt and config.json into a lewm checkpoint, tensor by tensor."""

    weights: tyro.conf.Positional[Path]  # The official state dict.
    config: tyro.conf.Positional[Path]  # The config.json beside it.
    out: tyro.conf.Positional[Path]  # A new folder.
    dataset: Path | None = None  # The dataset of these weights: planning needs its action statistics.
    frame_skip: int = 5  # Primitive actions per block.


def import_official(arguments: list[str]) -> None:
    """Convert the authors' checkpoints"""
    args = _parse(ImportArgs, arguments, "import-official")
    import numpy as np
    import torch

    from lewm.data.stats import action_stats, recorded_actions
    from lewm.data.store import EpisodeStore
    from lewm.model import official

    stats = recorded = None
    if args.dataset:
        with EpisodeStore(args.dataset) as store:
            stats = action_stats(store.actions)
            recorded = torch.from_numpy(recorded_actions(store.actions, store.lengths, np.arange(store.num_episodes)))
    out = official.import_official(args.weights, args.config, args.out, stats, args.frame_skip, recorded)
    _say(f"Imported to {out}. Look at it with `lewm info {out}`.")
    if stats is None:
        _say("It has no action statistics yet, so it cannot plan: import with --dataset to add them.")


@dataclass(frozen=True)
class DataCheckArgs:
    """Read a whole dataset file, say what it holds and list what is wrong with it: status 1 if anything is."""

    file: tyro.conf.Positional[Path]  # An HDF5 dataset, collected here or official.
    contact_sheet: Path | None = None  # Where to draw some of its frames; None: FILE.contact.png.


def data_check(arguments: list[str]) -> None:
    """Read everything, verify checksums, show statistics and a contact sheet"""
    args = _parse(DataCheckArgs, arguments, "data check")
    from lewm.data.check import check
    from lewm.progress import progress_bar

    sheet = args.contact_sheet or args.file.with_name(f"{args.file.name}.contact.png")
    with progress_bar(console, "check") as on_progress:
        report = check(args.file, sheet, on_progress)
    _print_grid((f"[bold]{name}[/]", escape(value)) for name, value in report.facts.items())
    table = Table("action", "mean", "std", "min", "max", "at min or max", box=None, header_style="bold")
    for number, (*values, at_bounds) in enumerate(report.actions):
        table.add_row(str(number), *(f"{value:.4g}" for value in values), f"{100 * at_bounds:.1f} %")
    console.print(table)
    _say(f"Contact sheet: {sheet}")
    if report.problems:
        raise DataError("\n- ".join([f"{args.file} has problems ({len(report.problems)}):", *report.problems]))
    _say("No problems found.")


@dataclass(frozen=True)
class DataConvertArgs:
    """Convert a dataset from and to HDF5, LeRobot (v3) and plain folders of PNG and NPZ (docs/data.md)."""

    source: tyro.conf.Positional[Path]  # An HDF5 file, a LeRobot dataset or a plain folder.
    target: tyro.conf.Positional[Path]  # A new file or folder.
    to: Literal["hdf5", "folder", "lerobot"] | None = None  # None: by the target's suffix.
    camera: str | None = None  # The LeRobot feature to take frames from, if there are several.
    resolution: int | None = None  # Side of the new frames; None: as they are.
    crop: bool = False  # Cut frames that are not square to their middle.
    fps: int = 10  # Rows per second of a LeRobot target.
    video_quality: Literal["lossless", "compact"] = "lossless"  # Of a LeRobot target; compact: plays in browsers.


def data_convert(arguments: list[str]) -> None:
    """From and to HDF5, LeRobot and plain folders"""
    args = _parse(DataConvertArgs, arguments, "data convert")
    from lewm.data.convert import convert
    from lewm.progress import progress_bar

    options: dict[str, Any] = {"camera": args.camera, "resolution": args.resolution, "crop": args.crop}
    options |= {"fps": args.fps, "quality": args.video_quality}
    with progress_bar(console, "convert") as on_progress:
        form = convert(args.source, args.target, args.to, **options, on_progress=on_progress)
    _say(f"Converted to {args.target} ({form}).")


@dataclass(frozen=True)
class DataShowArgs:
    """Write one episode of a dataset as a film."""

    file: tyro.conf.Positional[Path]  # An HDF5 dataset.
    episode: int = 0  # Its number, from 0.
    out: Path | None = None  # A .gif or .mp4 file; None: a GIF beside the dataset.
    fps: int = 10  # Frames per second.


def data_show(arguments: list[str]) -> None:
    """Write an episode as GIF or MP4"""
    args = _parse(DataShowArgs, arguments, "data show")
    from lewm.data.show import show

    _say(f"Film: {show(args.file, args.episode, args.out, args.fps)}")


DATA_VERBS: dict[str, Callable[[list[str]], None]] = {"check": data_check, "convert": data_convert, "show": data_show}


def data(arguments: list[str]) -> None:
    """Check, convert or show a dataset"""
    name, rest = _take_positional(arguments, "data", "COMMAND", f"one of {', '.join(DATA_VERBS)}")
    if name not in DATA_VERBS:
        raise ConfigError(unknown_name("data command", name, DATA_VERBS))
    DATA_VERBS[name](rest)


VERBS: dict[str, Callable[[list[str]], None]] = {
    "demo": demo,
    "collect": collect,
    "train": train,
    "eval": evaluate,
    "export": export,
    "compare": compare,
    "info": info,
    "data": data,
    "envs": envs,
    "import-official": import_official,
}


# -- the frame around them ------------------------------------------------------------------------------------------


def main() -> NoReturn:
    """Entry point of the `lewm` command."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command; returns the process's exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _dispatch(arguments)
        return 0
    except LewmError as error:
        errors.print(f"[bold red]Error:[/] {escape(str(error))}")
        return 1
    except KeyboardInterrupt:
        errors.print("Interrupted. The same command continues where it stopped (data tools start again).")
        return 130


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _dispatch(arguments: list[str]) -> None:
    verb, *rest = arguments or ["--help"]
    if verb in ("-h", "--help"):
        console.print("[bold]lewm[/]: learn a latent world model from pixels and actions, and plan in it.\n")
        _print_grid((f"  [bold]lewm {name}[/]", function.__doc__ or "") for name, function in VERBS.items())
        console.print(f"\n`lewm VERB --help` says what a verb takes. Presets: {', '.join(PRESETS)}.")
    elif verb in ("-V", "--version"):
        console.print(f"lewm {__version__}")
    elif verb in VERBS:
        VERBS[verb](rest)
    else:
        raise ConfigError(unknown_name("command", verb, VERBS))


def _parse(kind: type[T], arguments: list[str], prog: str, default: T | None = None) -> T:
    """Parse a verb's arguments; tyro names unknown options and the nearest known ones."""
    for argument in arguments:
        if sentence := advice(argument.partition("=")[0]):
            raise ConfigError(sentence)
    kwargs: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, prog=f"lewm {prog}", args=arguments, **kwargs)


def _take_positional(arguments: list[str], verb: str, name: str, meaning: str) -> tuple[str, list[str]]:
    """Split off the argument that decides what the others' defaults are."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], arguments[1:]
    usage = f"usage: lewm {verb} {name} [options]; {name} is {meaning}"
    if arguments and arguments[0] in ("-h", "--help"):
        console.print(escape(f"{usage}.\n`lewm {verb} {name} --help` lists the options."))
        raise SystemExit(0)
    raise ConfigError(f"{name} is missing. {usage}.")


def _say(message: str) -> None:
    console.print(message, markup=False)


def _print_rates(rates: dict[str, Rate]) -> None:
    from lewm.evaluate.results import LABELS

    table = Table("", "success", "95 % interval", "episodes", box=None, header_style="bold")
    for name, rate in rates.items():
        low, high = rate.interval
        interval = f"{100 * low:.1f} to {100 * high:.1f} %"
        table.add_row(LABELS[name], f"{100 * rate.value:.1f} %", interval, f"{rate.successes} of {rate.total}")
    console.print(table)


def _print_grid(rows: Any) -> None:
    table = Table.grid(padding=(0, 3))
    for row in rows:
        table.add_row(*row)
    console.print(table)


if __name__ == "__main__":
    main()
