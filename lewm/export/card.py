"""The model card: what a model was trained on and how, what it reaches, and how to repeat both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lewm import checkpoint
from lewm.checked import of_kind
from lewm.config import SCHEDULES, Config, EvalConfig, PlanConfig
from lewm.envs.registry import env_entry
from lewm.errors import DataError
from lewm.evaluate.results import by_name, not_results, read_rates
from lewm.evaluate.stats import Rate
from lewm.export.commands import asked_for, collect_command, eval_command, train_command
from lewm.files import read_json
from lewm.methods.base import Method
from lewm.plan.futures import can_plan
from lewm.presets import changed, read_config

CARD = "README.md"
# The lines of an evaluation's table, and the columns of the card's.
RATES = {"policy": "success", "policy_strict": "strict success", "random": "random", "random_strict": "random, strict"}
SOLVED_AT_START = "solved_at_start"
OPTIMISERS = {"adamw": "AdamW", "muon": "Muon for the matrices of transformer blocks, AdamW for the rest"}


@dataclass(frozen=True)
class Evaluated:
    """What a card says of one evaluation. rates: by their names (``lewm.evaluate.results.LABELS``)."""

    config: Config
    goal_offset: int
    rates: dict[str, Rate]
    seconds_per_plan: float
    device: str
    versions: dict[str, str]

    @staticmethod
    def read(path: Path, digest: str) -> Evaluated:
        """From a results file, which must be about the weights with this SHA-256."""
        document = read_json(path)
        try:
            found = document["checkpoint"] and document["checkpoint"]["weights_sha256"]
            rates = read_rates(path)
            config, goal_offset = read_config(document["config"]), of_kind(int, document["goal_offset"], "goal_offset")
            seconds = of_kind(float, document["times"]["seconds_per_plan_p50"], "times.seconds_per_plan_p50")
            of_what = {name: of_kind(str, text, f"versions.{name}") for name, text in document["versions"].items()}
            what = (config, goal_offset, rates, seconds, of_kind(str, document["device"], "device"), of_what)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise not_results(path, error) from error
        if found != digest:
            expected = f"SHA-256 {str(found)[:12]}… there, {digest[:12]}… exported here"
            remedy = "Export first, then give `lewm eval` the exported folder, and export again with its results"
            raise DataError(f"{path} has figures of other weights ({expected}). {remedy}.")
        return Evaluated(*what)

    @staticmethod
    def remembered(entry: dict[str, Any], run: Config) -> Evaluated:
        """What ``entry`` returned, for a model of this run."""
        try:
            config = changed(run, entry["settings"])
            config = replace(config, env=env_entry(config.env).gym_id)
            rates = {name: Rate(*counts) for name, counts in by_name(entry["rates"]).items()}
            rest = entry["seconds_per_plan"], entry["device"], entry["versions"]
            return Evaluated(config, entry["goal_offset"], rates, *rest)
        except (KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"An evaluation in the model's {checkpoint.CONFIG} is not one that lewm wrote (no {error}). Remove it "
                'from "evaluations" there, or copy the file again.'
            ) from error

    def entry(self, run: Config) -> dict[str, Any]:
        """As plain JSON values, for config.json; its settings are those that the model's run does not have."""
        return {
            "settings": asked_for(run, self.config),
            "goal_offset": self.goal_offset,
            "rates": {name: [rate.successes, rate.total] for name, rate in self.rates.items()},
            "seconds_per_plan": self.seconds_per_plan,
            "device": self.device,
            "versions": self.versions,
        }

    @property
    def question(self) -> tuple[int, PlanConfig, EvalConfig]:
        """What was asked: a second answer to it takes the place of the first. Processes have no part in it."""
        return self.config.seed, self.config.plan, replace(self.config.eval, workers=0)


def in_order(evaluations: Iterable[Evaluated]) -> list[Evaluated]:
    """As a card lists them: schedules of one planner together, where they can be compared; the last answer counts."""
    return sorted({evaluation.question: evaluation for evaluation in evaluations}.values(), key=_place_in_table)


def model_card(name: str, description: dict[str, Any], model: Method) -> str:
    """The Markdown of a card. description: what the model's config.json says."""
    run = read_config(description["run"], lost=[])
    evaluations = [Evaluated.remembered(entry, run) for entry in description["evaluations"]]
    plans = can_plan(model)
    tags = "world-model, planning" if plans else "goal-conditioned, policy"
    sections = [
        f"---\nlibrary_name: lewm\nlicense: mit\ntags: [{tags}]\n---",
        _introduction(name, model),
        f"## Success\n{_success(evaluations, plans)}",
        f"## Model\n{_table(_model_rows(model))}",
        f"## Data\n{_table(_data_rows(description['data']))}",
        f"## Training\n{_table(_training_rows(description['training'], run))}",
        f"## Commands\n{_commands(name, description, run, evaluations)}",
    ]
    return "\n\n".join(sections) + "\n"


def _introduction(name: str, model: Method) -> str:
    world = f" for `{model.facts.environment}`" if model.facts.environment else ""
    usage = f'```python\nimport lewm\n\nmodel = lewm.load("{name}")\n```'
    return f"# {name}\nA model of the method `{model.settings.NAME}`{world}, trained with lewm.\n\n{usage}"


def _model_rows(model: Method) -> list[list[str]]:
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    rows = {
        "method": model.settings.NAME,
        "parameters": f"{millions:.2f} M, matrices in bf16, vectors in float32",
        **model.settings.rows(),
        "actions": f"blocks of {model.frame_skip} actions of {model.action_dim} numbers",
    }
    return [["", ""], *map(list, rows.items())]


def _success(evaluations: Sequence[Evaluated], plans: bool) -> str:
    """Of a method that acts, nothing is said of plans, though its runs have settings for them."""
    if not evaluations:
        return "Not evaluated yet."
    of_plans = ("replanning", "planner", "s per plan")
    header = ["pairs", "replanning", *RATES.values(), "solved at start", "planner", "s per plan"]
    rows = [header, *(_success_row(evaluation) for evaluation in evaluations)]
    if not plans:
        rows = [[cell for name, cell in zip(header, row, strict=True) if name not in of_plans] for row in rows]
    settings, offset = evaluations[0].config.eval, evaluations[0].goal_offset
    timed = " `s per plan`: the median; plans made together share their time equally." if plans else ""
    doing = "Planning" if plans else "Acting"
    explained = (
        f"{doing} with exactly these weights, after their conversion to bf16, on frozen pairs that no dataset has: "
        f"goals {offset} steps ahead, {settings.budget} actions allowed. `success`: the paper's protocol; `strict "
        "success` leaves out pairs that are solved at the start, and does not count passing through the goal. Wilson "
        f"intervals at 95 %. `random`: uniform actions on the same pairs.{timed}"
    )
    where = "; ".join(sorted({_environment(evaluation) for evaluation in evaluations}))
    return f"{explained}\n\n{_table(rows)}\n\nEvaluated on {where}."


def _place_in_table(evaluation: Evaluated) -> tuple[str, str, int]:
    plan = evaluation.config.plan
    return _manifest(evaluation), _planner(plan), SCHEDULES.index(plan.schedule)


def _manifest(evaluation: Evaluated) -> str:
    return Path(evaluation.config.eval.manifest or "paper").name


def _success_row(evaluation: Evaluated) -> list[str]:
    plan = evaluation.config.plan
    rates, solved = (str(evaluation.rates[name]) for name in RATES), evaluation.rates[SOLVED_AT_START]
    already = f"{solved.successes}/{solved.total}"
    return [_manifest(evaluation), plan.schedule, *rates, already, _planner(plan), f"{evaluation.seconds_per_plan:.2g}"]


def _planner(plan: PlanConfig) -> str:
    usual = PlanConfig()
    width = plan.samples if plan.solver in ("cem", "icem", "mppi") else plan.gradient.restarts
    elites = f", {plan.elites} elites" if plan.solver in ("cem", "icem") else ""
    icem, noise, momentum = plan.icem, "", ""
    if plan.solver == "icem":
        noise = f", noise exponent {icem.noise_exponent:g}"
        if icem.recorded:
            noise = f", {icem.recorded} iterations of recorded actions, noise like these"
        momentum = f", momentum {icem.momentum:g}" if icem.momentum != usual.icem.momentum else ""
    spread = f", first spread {plan.init_std:g}" if plan.init_std != usual.init_std else ""
    limit = f", actions within ±{plan.action_limit:g}" if plan.action_limit else ""
    warm = ", from the last plan" if plan.warm_start else ""
    search = f"{plan.solver} {width}×{plan.iterations}{elites}{noise}{momentum}{spread}"
    return f"{search}, horizon {plan.horizon}{limit}{warm}"


def _environment(evaluation: Evaluated) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    return f"{evaluation.device} ({versions})"


def _data_rows(data: dict[str, Any] | None) -> list[list[str]]:
    if data is None:
        return [["", ""], ["dataset", "not recorded: it was not there when the model was exported"]]
    strided = f", of one step in {data['frame_stride']}" if data["frame_stride"] > 1 else ""
    exploration, mistakes = data.get("exploration"), data.get("mistakes")
    rows = {
        "environment": data["environment"],
        "episodes": f"{data['episodes']:,}, of {data['steps']:,} steps in all",
        "frames": f"{data['frames']:,} of {data['resolution']} px{strided}",
        "seed": data["seed"],
        "generator": f"`{data['generator']}`" if data["generator"] else None,
        "demonstrations": f"SHA-256 `{data['demonstrations']}`" if data["demonstrations"] else None,
        "exploration": f"up to {100 * exploration:g} % of an episode's actions" if exploration else None,
        "mistakes": f"for up to {100 * mistakes:g} % of an episode" if mistakes else None,
    }
    return [["", ""], *([name, str(value)] for name, value in rows.items() if value is not None)]


def _training_rows(training: dict[str, Any] | None, run: Config) -> list[list[str]]:
    if training is None:
        return [["", ""], ["training", "not recorded"]]
    settings, minutes = run.train, training.get("minutes")
    decay = f"cosine to {100 * settings.final_lr_fraction:g} %"
    rows = {
        "steps": f"{training['step']:,} of {settings.steps:,}, {settings.batch_size} windows each",
        "windows": f"{training['windows']:,}",
        "minutes": f"{minutes:.1f} (reading data and compiling not counted)" if minutes else None,
        "device": training.get("device"),
        "learning rate": f"{settings.lr:g}, {settings.warmup_steps} steps of warm-up, {decay}",
        "optimiser": f"{OPTIMISERS[settings.optimizer]}, weight decay {settings.weight_decay:g}, "
        f"gradient norm at most {settings.clip_norm:g}",
        "seed": str(run.seed),
        "precision": settings.precision,
    }
    return [["", ""], *([name, value] for name, value in rows.items() if value is not None)]


def _commands(name: str, description: dict[str, Any], run: Config, evaluations: Sequence[Evaluated]) -> str:
    data = description["data"]
    known = data is not None and data["environment"] is not None and data["seed"] is not None
    lines = [collect_command(data, run.data)] if known else []
    if description["training"]:
        lines += [train_command(run), f"lewm export {run.out or 'RUN'} pretrained/{name}"]
    lines += [eval_command(name, run, evaluation.config) for evaluation in evaluations]
    demos = "\n\n`DEMOS`: demonstrations with the content above." if known and data["demonstrations"] else ""
    return "```\n" + "\n".join(lines) + f"\n```{demos}"


def _table(rows: Iterable[Sequence[str]]) -> str:
    header, *body = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([header, f"|{' --- |' * (header.count('|') - 1)}", *body])
