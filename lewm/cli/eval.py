"""`lewm eval`: measure how often a model reaches an environment's frozen goals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from lewm.checked import flat
from lewm.cli.frame import console, parse, print_rates, say, take_positional
from lewm.cli.progress import progress_bar
from lewm.config import Config, EvalConfig, PlanConfig, SolverName
from lewm.errors import ConfigError
from lewm.files import RESULTS, check_output, check_place
from lewm.types import WorldModel

if TYPE_CHECKING:
    from lewm.evaluate.question import Question
    from lewm.evaluate.results import Evaluation
    from lewm.methods.base import Method
    from lewm.understand.decoder import Drawer


@dataclass(frozen=True)
class EvalArgs:
    """Plan to the goals of an environment's frozen manifest. Defaults come from the checkpoint's own run."""

    env: str = ""  # Another world than the one that the model was trained in.
    manifest: str | None = None  # Short for --eval.manifest.
    solver: SolverName | None = None  # Short for --plan.solver.
    tuned: bool = False  # Plan as was best for the environment's trained model; --plan.X still counts.
    fixed_flops: float | None = None  # Choose plan.iterations so that a plan takes at most so much arithmetic.
    # Where to write the results as JSON; None: named by what is asked, in RUN/evaluations/STEP for a run's checkpoint,
    # in evaluations/MODEL here for other models.
    out: Path | None = None
    videos: int = 0  # Show so many episodes as GIFs, in a folder beside the results.
    # Draws in them what each plan imagined: a file that `lewm understand decode --train` wrote; None: the one that it
    # left in understanding/NAME here, if it is this model's, or else the model's own, if it has one.
    decoder: Path | None = None
    seed: int = 0  # Of the planner's random streams.
    device: str = "auto"  # auto: cuda, then mps, then cpu.
    plan: PlanConfig = field(default_factory=PlanConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)

    def __post_init__(self) -> None:
        if not 0 <= self.videos <= self.eval.episodes:
            raise ConfigError(f"videos must be between 0 and eval.episodes ({self.eval.episodes}), got {self.videos}.")
        if self.decoder and not self.videos:
            raise ConfigError("--decoder draws in videos, and none is asked for. Add --videos N.")
        if self.fixed_flops is not None and not 0 < self.fixed_flops < math.inf:
            raise ConfigError(f"fixed_flops must be a positive number, got {self.fixed_flops}.")


def run(arguments: list[str]) -> None:
    """Evaluate behind a progress bar, and print the rates."""
    source, rest = take_positional(arguments, "eval", "CHECKPOINT", "a model or run folder, a name or a hub id")
    from lewm import checkpoint
    from lewm.envs.registry import env_entry
    from lewm.evaluate import animation, flops
    from lewm.evaluate.question import ask
    from lewm.evaluate.results import read_failures, read_rates
    from lewm.evaluate.runner import evaluate
    from lewm.export.commands import eval_command
    from lewm.methods.files import load, read_facts, run_settings
    from lewm.plan.futures import can_plan
    from lewm.plan.tuned import tuned_plan

    folder = checkpoint.resolve(source)
    document, lost = checkpoint.load_document(folder), list[str]()
    trained = run_settings(document, folder, lost)
    for sentence in lost:
        say(f"Of this model's run: {sentence}")
    world = read_facts(document, folder).environment or ""
    default = EvalArgs(env=world, seed=trained.seed, plan=trained.plan, eval=trained.eval)
    args = parse(EvalArgs, rest, f"eval {source}", default)
    if not args.env:
        raise ConfigError(f"{folder} does not say which world it was trained in. Name one with --env.")
    if world and env_entry(args.env) != env_entry(world):
        say(f"This model was trained in {world}; it is evaluated in {args.env}, as asked.")
    if args.tuned:  # other defaults, so what was asked for is read again
        tuned = tuned_plan(env_entry(args.env).name, trained.plan)
        args = parse(EvalArgs, rest, f"eval {source}", replace(default, plan=tuned))
    plan = replace(args.plan, solver=args.solver) if args.solver else args.plan
    settings = replace(args.eval, manifest=args.manifest) if args.manifest else args.eval
    if args.out:
        check_output(args.out, RESULTS, [folder, *([Path(settings.manifest)] if settings.manifest else [])])
    model = load(folder, args.device)
    if not can_plan(model):
        _refuse_planning(args, trained.plan, f"{source} is of the method {model.settings.NAME!r}")
    if args.fixed_flops is not None:
        world_model = cast(WorldModel, model)
        plan = flops.with_fixed_flops(world_model, plan, args.fixed_flops)
        spent = flops.plan_flops(world_model, plan)
        say(f"{plan.iterations} iterations of {plan.solver}: {spent:.2e} floating-point operations per plan.")
    config = replace(trained, env=args.env, seed=args.seed, device=args.device, plan=plan, eval=settings)
    question = ask(model, config)
    out = args.out or question.place(source, folder)
    videos = out.with_name(f"{out.stem}_videos")
    if args.videos:
        check_place(videos / "film.gif", [folder])
    drawer = _drawer(args.decoder, source, args.device) if args.videos and can_plan(model) else None
    asked = eval_command(source, trained, config)
    evaluation = evaluate_with_progress(model, config, question, out, folder, console, asked)
    rates, failures = read_rates(out), read_failures(out)
    if evaluation is None:
        say("This very question was answered before; nothing is done again.")
    print_rates(rates)
    for sentence in failures:
        say(sentence)
    say(f"Results: {out}")
    if args.videos:
        few = replace(config, eval=replace(config.eval, episodes=args.videos))
        shown = evaluation or evaluate(model, few, elsewhere=True)  # results do not say what was seen
        results = [result for result in shown.results[: args.videos] if not result.failure]
        imagined = None
        if drawer:
            from lewm.understand.plans import imagined_plans

            imagined = imagined_plans(model, drawer.decoder, config.env, plan, results)
        animation.write_videos(videos, config.env, results, imagined)
        say(f"Videos: {videos}")


def _drawer(asked: Path | None, source: str, device: str) -> Drawer | None:
    """Who draws what plans imagine; None: nobody can."""
    from lewm.understand.decode import fits
    from lewm.understand.decoder import decoder_place, load_decoder, own_decoder, read_about
    from lewm.understand.subject import open_subject

    beside = decoder_place(Path("understanding") / Path(source).name)
    subject = open_subject(source, device)
    if reason := fits(subject):
        if asked:
            raise ConfigError(f"{source} cannot be decoded: {reason}. Leave out --decoder.")
        return None
    if asked:
        return load_decoder(asked, subject)
    if beside.is_file() and read_about(beside)["model"] == subject.digest:
        return load_decoder(beside, subject)
    return own_decoder(subject)


def _refuse_planning(args: EvalArgs, usual: PlanConfig, what: str) -> None:
    """Of a method that acts, settings of planning would be passed over in silence."""
    shorts = {"--solver": args.solver, "--tuned": args.tuned, "--fixed-flops": args.fixed_flops}
    given = [flag for flag, value in shorts.items() if value not in (None, False)]
    if not args.tuned:  # or all that is tuned would be named
        old, new = flat(usual), flat(args.plan)
        given += [f"--plan.{name.replace('_', '-')}" for name in sorted(new) if new[name] != old[name]]
    if given:
        raise ConfigError(f"{what}, which acts and makes no plans. Leave out {', '.join(given)}.")


def evaluate_with_progress(
    model: Method,
    config: Config,
    question: Question,
    out: Path,
    folder: Path,
    console: Console,
    command: str | None = None,
) -> Evaluation | None:
    """Evaluate behind a progress bar, from where an interrupted call stopped; the results go to the file ``out``.

    folder: of the model's files. command: that asks it again. None if the results of this question are there already.
    """
    from lewm.evaluate.answer import answering
    from lewm.evaluate.results import model_files
    from lewm.evaluate.runner import evaluate

    with answering(out, question) as journal:
        if journal is None:
            return None
        if journal.earlier:
            console.print(f"Going on from {journal.path}: {journal.earlier:,} plans are there.", markup=False)
        files = model_files(folder)
        with progress_bar(console, "plan") as on_progress:
            evaluation = evaluate(model, config, on_progress, journal, elsewhere=True)
        evaluation.save(out, files, question, command)
        journal.remove()
    return evaluation
