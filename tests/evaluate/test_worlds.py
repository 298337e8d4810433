"""Environments in this process and in others: the same results, and failures that are explained."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from lewm.config import Config, EvalConfig, PlanConfig
from lewm.envs import registry
from lewm.envs.registry import env_entry
from lewm.errors import EnvError
from lewm.evaluate import episodes, runner
from lewm.evaluate.episodes import Episode, Task, run_episodes
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.policies import AgentPolicy, RandomPolicy
from lewm.evaluate.results import Evaluation, read_failures
from lewm.evaluate.runner import evaluate
from lewm.evaluate.stats import Rate
from lewm.evaluate.worker import ProcessWorlds
from lewm.evaluate.worlds import LocalWorlds, Order, Setting
from lewm.methods.lewm import LeWM
from lewm.plan.agent import Agent
from lewm.plan.policy import PlanningPolicy
from lewm.types import Array, EpisodeSpec

SPECS = load_manifest("tworoom").first(5)
SETTING = Setting(env_entry("tworoom"), resolution=28, frame_skip=5, history=2)


def assert_equal(one: Any, other: Any) -> None:
    """The same fields, bitwise."""
    for (name, a), b in zip(asdict(one).items(), asdict(other).values(), strict=True):
        np.testing.assert_equal(a, b, err_msg=name)


@pytest.fixture
def processes() -> Iterator[ProcessWorlds]:
    worlds = ProcessWorlds(SETTING, SPECS, workers=2)
    yield worlds
    worlds.close()


def test_only_frames_that_will_be_looked_at_are_drawn():
    worlds = LocalWorlds(SETTING, SPECS)
    actions = np.random.default_rng(0).uniform(-2, 2, (20, 2)).astype(np.float32)
    worlds.submit([Order(0, actions, budget=50), Order(1, actions, budget=20), Order(2, actions[:5], budget=6)])
    going_on, ended, one_block = worlds.collect()
    assert (len(going_on.states), len(ended.states), len(one_block.states)) == (20, 20, 5)
    assert (len(going_on.frames), len(ended.frames), len(one_block.frames)) == (2, 0, 1)
    np.testing.assert_array_equal(going_on.executed, np.clip(actions, -1, 1))
    env = registry.make_env("tworoom", resolution=28)
    np.testing.assert_array_equal(going_on.frames, env.render_states(going_on.states[[14, 19]]))
    worlds.close()


def test_processes_do_what_this_one_does(processes: ProcessWorlds):
    local = LocalWorlds(SETTING, SPECS)
    for one, other in zip(local.openings, processes.openings, strict=True):
        assert_equal(one, other)
    rng = np.random.default_rng(0)
    # Two rounds are under way at once, with their episodes out of order and not all of them.
    rounds = [[Order(n, rng.uniform(-1, 1, (10, 2)), 50) for n in numbers] for numbers in ((4, 1, 0), (3, 2))]
    for worlds in (local, processes):
        for orders in rounds:
            worlds.submit(orders)
    for _ in rounds:
        for one, other in zip(local.collect(), processes.collect(), strict=True):
            assert_equal(one, other)


@pytest.mark.parametrize("workers", [2, 5])
def test_results_do_not_depend_on_the_number_of_workers(debug_model: LeWM, workers: int):
    plan = PlanConfig(horizon=2, samples=8, iterations=2, elites=2, schedule="receding", warm_start=True)

    def run(workers: int) -> list[Any]:
        task = Task("tworoom", SPECS, 17, workers, group_size=2)
        return [*run_episodes(AgentPolicy(Agent(debug_model, plan)), task), *run_episodes(RandomPolicy(0), task)]

    for one, other in zip(run(1), run(workers), strict=True):
        assert_equal(one, other)


def test_many_orders_can_wait_while_answers_do():
    """More than fits into the sockets' buffers, both ways: nobody waits for the other for ever."""
    worlds = ProcessWorlds(replace(SETTING, resolution=112), SPECS[:2], workers=1)
    rounds = [[Order(n, np.zeros((400, 2)), 1000) for n in (0, 1)] for _ in range(20)]
    for orders in rounds:
        worlds.submit(orders)
    assert all(len(happened.states) == 400 for _ in rounds for happened in worlds.collect())
    worlds.close()


def test_groups_move_while_others_are_decided_upon():
    log: list[str] = []

    class Watched(LocalWorlds):
        def submit(self, orders: Sequence[Order]) -> None:
            log.append(f"submit {[order.number for order in orders]}")
            super().submit(orders)

        def collect(self) -> Any:
            log.append("collect")
            return super().collect()

    class Still:
        history, frame_skip, image_size = 0, 5, 8

        def begin(self, episodes: Sequence[Episode]) -> None:
            log.append(f"begin {len(episodes)}")

        def decide(self, episodes: Sequence[Episode]) -> list[Array]:
            log.append("decide")
            return [np.zeros((5, 2)) for _ in episodes]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(episodes, "LocalWorlds", Watched)
        run_episodes(Still(), Task("tworoom", SPECS[:3], 10, group_size=2))
    one, other = ["decide", "submit [0, 1]"], ["decide", "submit [2]"]
    assert log == ["begin 3", *one, *other, "collect", *one, "collect", *other, "collect", "collect"]


def test_slow_simulators_get_processes_unasked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "cores", lambda: 16)
    quick, slow = env_entry("tworoom"), replace(env_entry("tworoom"), slow=True)
    assert runner._worker_count(0, quick, episodes=50) == 1
    assert runner._worker_count(0, slow, episodes=50) == 16
    assert runner._worker_count(0, slow, episodes=3) == 3
    assert runner._worker_count(2, quick, episodes=50) == 2
    assert (runner._group_size(50, quick, 50), runner._group_size(50, slow, 50)) == (50, 25)
    assert (runner._group_size(50, slow, 200), runner._group_size(50, slow, 1)) == (50, 1)


# -- failures -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [1, 2])
def test_a_state_that_cannot_be_is_refused(workers: int):
    impossible = EpisodeSpec(1, (-500.0, 0.0), (60.0, 60.0))
    with pytest.raises(EnvError, match=r"TwoRoom's state .*must lie between"):
        run_episodes(RandomPolicy(0), Task("tworoom", [SPECS[0], impossible], 10, workers))


def test_a_worker_that_fails_says_why(processes: ProcessWorlds):
    processes.submit([Order(0, np.full((5, 2), np.nan), 50)])
    with pytest.raises(EnvError, match="action must be finite"):
        processes.collect()
    processes.submit([Order(1, np.zeros((5, 3)), 50)])
    with pytest.raises(EnvError, match="An environment failed: ValueError"):
        processes.collect()


@pytest.fixture
def broken_worlds() -> Iterator[None]:
    """The worlds "cliff" and "fog" are known, to workers as well."""
    made = {name: f"cliff:{name.capitalize()}" for name in ("cliff", "fog")}
    for name, place in made.items():
        entry = replace(env_entry("tworoom"), name=name, gym_id=f"test/{name}-v0", entry_point=place)
        registry.register_env(entry)
    yield
    for name in made:
        gymnasium.registry.pop(registry.ENTRIES.pop(name).gym_id)


class Right:
    """Stands still, but for a block of steps to the right."""

    history, frame_skip, image_size = 1, 5, 8

    def begin(self, episodes: Sequence[Episode]) -> None: ...

    def decide(self, episodes: Sequence[Episode]) -> list[Array]:
        return [np.tile(np.float32([e.steps == 10, 0]), (5, 1)) for e in episodes]


FAR, NEAR = ((22.0, 150.0), (47.0, 150.0)), ((48.0, 150.0), (48.0, 158.0))


@pytest.mark.parametrize(
    ("name", "what"), [("cliff", r"ArithmeticError('the solver\n diverged')"), ("fog", "its state is [nan nan]")]
)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.usefixtures("broken_worlds")
def test_an_episode_whose_simulator_fails_counts_as_failed_and_the_others_go_on(workers: int, name: str, what: str):
    specs = [EpisodeSpec(0, *FAR), EpisodeSpec(1, *NEAR), EpisodeSpec(2, *FAR)]
    seen: list[tuple[int, int]] = []
    first, lost, last = run_episodes(Right(), Task(name, specs, 20, workers, 2), lambda *at: seen.append(at))
    assert (first.failure, last.failure) == (None, None)
    assert (first.success, last.success, len(first.states)) == (True, True, 21)
    assert lost.failure == f"its simulator failed after 10 steps: {what}"
    assert (lost.success, lost.strict_success, lost.first_success) == (False, None, None), "it began at its goal"
    assert lost.reached.tolist() == [False] * 20
    assert lost.states.tolist() == [list(NEAR[0])] * 11
    assert seen[-1][0] >= 55
    assert {total for _, total in seen} == {60}


@pytest.mark.usefixtures("broken_worlds")
def test_failed_episodes_are_named_in_the_results_and_those_of_random_actions_too(
    debug_model: LeWM, debug_config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(PlanningPolicy, "decide", lambda _self, memories: [np.tile([1, 0], (5, 1)) for _ in memories])
    pairs = [{"start": NEAR[0], "goal": FAR[0]}, {"start": (62.0, 150.0), "goal": (82.0, 150.0)}]
    manifest = tmp_path / "pairs.json"
    manifest.write_text(json.dumps({"environment": "test/cliff-v0", "goal_offset": 5, "pairs": pairs}))

    def evaluated(count: int) -> Evaluation:
        settings = EvalConfig(episodes=count, budget=20, manifest=str(manifest))
        return evaluate(debug_model, replace(debug_config, env="cliff", eval=settings), elsewhere=True)

    with pytest.raises(EnvError, match=r"^Every episode failed. The first: its simulator failed after 0 steps: Arith"):
        evaluated(1)
    path = tmp_path / "results.json"
    evaluation = evaluated(2)
    evaluation.save(path)
    assert evaluation.rates()["policy"] == Rate(1, 2)
    assert read_failures(path)[0].startswith("Episode 0 counts as not reached: its simulator failed after 0 steps")
    rows = json.loads(path.read_text())["episodes"]
    assert ["failure" in row for row in rows] == [True, False]
    assert [row["success"] for row in rows] == [False, True]
    random = [outcome.failure is not None for outcome in evaluation.random_results]
    assert ["random_policy_failure" in row for row in rows] == random


def test_a_worker_that_dies_is_noticed(processes: ProcessWorlds):
    processes.submit([Order(1, np.zeros((100_000, 2)), 200_000)])
    os.kill(processes._workers[1]._process.pid, signal.SIGKILL)
    with pytest.raises(EnvError, match="process with environments died"):
        processes.collect()
    with pytest.raises(EnvError, match="process with environments died"):
        processes.submit([Order(1, np.zeros((5, 2)), 50)])


def test_closing_leaves_no_process(processes: ProcessWorlds):
    pids = [worker._process.pid for worker in processes._workers]
    processes.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


PARENT = """
import time
from lewm.evaluate.manifest import load_manifest
from lewm.evaluate.results import Evaluation, read_failures
from lewm.evaluate.runner import evaluate
from lewm.evaluate.stats import Rate
from lewm.evaluate.worker import ProcessWorlds
from lewm.evaluate.worlds import Setting
from lewm.envs.registry import env_entry

worlds = ProcessWorlds(Setting(env_entry("tworoom"), 8, 5, 1), load_manifest("tworoom").first(2), workers=2)
print(*(worker._process.pid for worker in worlds._workers), flush=True)
time.sleep(60)
"""


def is_running(pid: str) -> bool:
    status = Path(f"/proc/{pid}/stat")
    # A zombie has ended, and waits for the system's first process to notice.
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes in /proc")
def test_workers_end_with_a_parent_that_is_killed():
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = parent.stdout.readline().split()
        assert [is_running(pid) for pid in pids] == [True, True]
        parent.kill()
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.01)


SCRIPT = """
import lewm
from lewm.envs.registry import EnvEntry
from lewm.evaluate.episodes import Task, run_episodes
from lewm.evaluate.policies import RandomPolicy
from lewm.types import EpisodeSpec

print("started")
lewm.register_env(EnvEntry("mine", "lewm/Mine-v0", "my_envs:Mine", "my_envs:expert", 9, 2, "A world of my own."))
specs = [EpisodeSpec(i, (60.0, 60.0), (60.0, 90.0)) for i in range(2)]
results = run_episodes(RandomPolicy(0), Task("mine", specs, 10, workers=2))
print(*(len(result.states) for result in results))
"""
MODULE = """
import sys
from lewm.envs.tworoom import TwoRoom

assert "torch" not in sys.modules, "a worker needs no torch"
print("a simulator says hello")

class Mine(TwoRoom):
    pass
"""


def test_a_script_with_an_environment_of_its_own(tmp_path: Path):
    """Not run again by its workers, which know the environment that it registered; what they print goes to stderr."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "my_envs.py").write_text(MODULE)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "timeout": 60}
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["started", "11 11", ""]
    assert done.stderr.count("a simulator says hello") == 2
