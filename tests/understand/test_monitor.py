"""The monitor: alarms at planted changes, as often as was asked for on normal data, and never for the wrong model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ruler import BLOCK, HISTORY, SIDE, Ruler, RulerConfig, episodes

import lewm
from lewm.data.store import EpisodeStore
from lewm.envs.registry import make_env
from lewm.errors import ConfigError, DataError, FileError
from lewm.presets import preset
from lewm.types import ActionStats, DataFacts
from lewm.understand.monitor import Surprise
from lewm.understand.monitor_calibration import AlarmRate, Calibration, Per, calibrated, count_alarms

Scores = list[np.ndarray]


@pytest.fixture(autouse=True)
def _forgetful(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test finds another's calibrations."""
    monkeypatch.setenv("LEWM_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return episodes(tmp_path_factory.mktemp("data") / "data.h5", 40)


def heavy_tailed(count: int, seed: int) -> Scores:
    """Scores of episodes of several lengths, whose scale differs from one to the next, with outliers."""
    rng = np.random.default_rng(seed)
    scales, lengths = np.exp(0.7 * rng.normal(size=count)), rng.integers(20, 80, count)
    return [
        scale * np.exp(1.2 * rng.normal(size=length)) * np.where(rng.random(length) < 0.01, 30, 1)
        for scale, length in zip(scales, lengths, strict=True)
    ]


@pytest.mark.parametrize(("per", "asked"), [("step", 0.05), ("step", 0.01), ("episode", 0.1), ("episode", 0.02)])
def test_false_alarms_on_unseen_heavy_tailed_scores_are_those_asked_for(per: Per, asked: float) -> None:
    unseen = heavy_tailed(4000, seed=0)
    values = []
    for seed in range(1, 31):
        found = calibrated(heavy_tailed(300, seed), "model", 1, asked, per)
        by_step, by_episode = count_alarms(unseen, found.threshold)
        values.append((by_step if per == "step" else by_episode).value)
    few = per == "episode" and asked == 0.02  # of 300 episodes, six
    near, spread = (1.3, 3) if few else (1.15, 1.5)
    assert asked / near < np.mean(values) < asked * near
    assert np.mean([asked / spread < value < asked * spread for value in values]) >= 0.9


def test_counted_rates_hold_the_true_ones() -> None:
    unseen, held = heavy_tailed(4000, seed=0), []
    for seed in range(1, 41):
        found = calibrated(heavy_tailed(150, seed), "model", 1, 0.05, "step")
        truth = count_alarms(unseen, found.threshold)
        held += [rate.interval[0] <= true.value <= rate.interval[1] for rate, true in zip(
            (found.by_step, found.by_episode), truth, strict=True
        )]  # fmt: skip
    assert np.mean(held) >= 0.8, "95 % intervals of rates, whose thresholds are uncertain as well"


def test_alarms_that_come_together_count_less() -> None:
    together, apart = np.zeros((20, 50)), np.zeros((20, 50))
    together[0], apart[:, :2], apart[:10, 2] = 1, 1, 1
    rates = [count_alarms(list(scores), 0.5)[0] for scores in (together, apart)]
    assert [rate.alarms for rate in rates] == [50, 50]
    assert rates[0].effective < 40 < rates[1].effective
    assert AlarmRate(0, 1000, 20).interval[1] > 0.1


def test_too_little_data_for_a_rate_is_said() -> None:
    with pytest.raises(DataError, match="1 % of episodes take 125 or more"):
        calibrated(heavy_tailed(100, 0), "model", 1, 0.01, "episode")
    calibrated(heavy_tailed(125, 0), "model", 1, 0.01, "episode")
    with pytest.raises(DataError, match="takes 10 episodes or more"):
        calibrated(heavy_tailed(9, 0), "model", 1, 0.1)
    with pytest.raises(DataError, match="not all finite"):
        calibrated([np.array([math.nan])] * 20, "model", 1, 0.1)
    with pytest.raises(ConfigError, match="share between 0 and 1"):
        calibrated(heavy_tailed(20, 0), "model", 1, 1.0)
    with pytest.raises(ConfigError, match='"step" or "episode"'):
        calibrated(heavy_tailed(20, 0), "model", 1, 0.1, "day")  # type: ignore[arg-type]


# -- in the loop -----------------------------------------------------------------------------------------------------


def walk(monitor: Any, data: Path, episode: int, moved_at: int | None = None) -> list[Surprise]:
    """What the monitor says of an episode, in which the agent may be put elsewhere after so many actions."""
    env = make_env("tworoom", SIDE)
    with EpisodeStore(data) as store:
        begin, steps = int(store.offsets[episode]), int(store.lengths[episode]) - 1
        env.reset(options={"state": store.read_column("state")[begin]})
        actions = store.actions[begin : begin + steps]
    monitor.reset()
    said = [monitor.step(env.render())]
    for step, action in enumerate(actions, 1):
        env.step(action)
        if step == moved_at:
            x, y = env.state
            env.set_state(np.array([x, y - 25 if y > 112 else y + 25]))
        said.append(monitor.step(env.render(), action))
    return said


def longest(data: Path) -> int:
    with EpisodeStore(data) as store:
        return int(store.lengths.argmax())


def test_it_alarms_when_something_was_moved_and_only_then(data: Path) -> None:
    monitor = lewm.SurpriseMonitor(Ruler())
    monitor.calibrate(data, false_alarms=0.01)
    episode, moved_at = longest(data), 30
    quiet, moved = walk(monitor, data, episode), walk(monitor, data, episode, moved_at)
    assert [said.score for said in moved[:moved_at]] == [said.score for said in quiet[:moved_at]]
    assert moved[moved_at].alarm
    assert moved[moved_at].score == pytest.approx(25**2, rel=0.3)
    assert sum(said.alarm for said in quiet) <= 2
    # The frames of the next blocks were expected from before; those after them know of it.
    assert all(said.alarm for said in moved[moved_at : moved_at + BLOCK])


def test_the_first_frames_have_no_score_and_others_that_of_the_whole_episode(data: Path) -> None:
    for every in (1, BLOCK):
        monitor = lewm.SurpriseMonitor(Ruler(), threshold=1.0, every=every)
        said = walk(monitor, data, 0)
        scored = [each.score for each in said if each.score is not None]
        assert next(each.step for each in said if each.score is not None) == HISTORY * BLOCK
        np.testing.assert_allclose(scored, next(iter(monitor.scores(data, episodes=1))), rtol=1e-4, atol=1e-4)


def test_bf16_gives_nearly_the_same_scores(debug_run: Path, data: Path) -> None:
    model = lewm.load(debug_run, "cpu")
    exact, narrow = (
        next(iter(lewm.SurpriseMonitor(model, 1.0, 5, precision).scores(data, episodes=1)))
        for precision in ("float32", "bf16")
    )
    assert (exact != narrow).any()
    np.testing.assert_allclose(narrow, exact, rtol=0.1, atol=0.02 * np.median(exact))


@pytest.mark.parametrize("method", ["lewm", "pldm", "dino_wm"])
def test_every_world_model_can_be_monitored(method: str, data: Path) -> None:
    stats = ActionStats((0.0, 0.0), (1.0, 1.0))
    settings = preset("debug", method).method
    monitor = lewm.SurpriseMonitor(
        settings.build(DataFacts(stats)).eval(), 1.0, settings.inputs().frame_skip, "float32"
    )
    scored = [said.score for said in walk(monitor, data, longest(data)) if said.score is not None]
    (expected,) = list(monitor.scores(data))[longest(data) : longest(data) + 1]
    np.testing.assert_allclose(scored, expected, rtol=1e-3, atol=1e-4)


def test_a_trained_model_alarms_as_often_as_asked_on_unseen_episodes(debug_run: Path, tmp_path: Path) -> None:
    path = episodes(tmp_path / "data.h5", 120, stride=5)
    monitor = lewm.SurpriseMonitor(lewm.load(debug_run, "cpu"), every=5)
    scores = [each for each in monitor.scores(path) if len(each)]
    found = calibrated(scores[: len(scores) // 2], "model", 5, 0.1, "step")
    by_step, _ = count_alarms(scores[len(scores) // 2 :], found.threshold)
    assert 0.1 / 1.5 < by_step.value < 0.1 * 1.5


# -- calibrations ------------------------------------------------------------------------------------------------------


def test_auto_finds_the_calibration_of_this_very_model(data: Path, tmp_path: Path) -> None:
    fresh = lewm.SurpriseMonitor(Ruler())
    with pytest.raises(ConfigError, match=r"no calibration on this machine\. Call monitor\.calibrate"):
        fresh.step(np.zeros((SIDE, SIDE, 3), np.uint8))
    counted: list[tuple[int, int]] = []
    made = fresh.calibrate(data, 0.05, episodes=30, on_progress=lambda done, total: counted.append((done, total)))
    assert counted[-1] == (30, 30)
    assert lewm.SurpriseMonitor(Ruler()).threshold == made.threshold
    made.save(tmp_path / "calibration.json")
    assert Calibration.load(tmp_path / "calibration.json") == made
    assert lewm.SurpriseMonitor(Ruler(), tmp_path / "calibration.json").calibration == made
    other = Ruler(RulerConfig(reversed=True))
    assert lewm.SurpriseMonitor(other).calibration is None
    with pytest.raises(ConfigError, match="of another model"):
        lewm.SurpriseMonitor(other, tmp_path / "calibration.json")
    with pytest.raises(ConfigError, match="every=1"):
        lewm.SurpriseMonitor(Ruler(), made, every=BLOCK)


def test_a_calibration_holds_for_its_precision(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = lewm.SurpriseMonitor(Ruler(), precision="bf16").calibrate(data, 0.05, episodes=30)
    assert made.precision == "bf16"
    with pytest.raises(ConfigError, match="calibration is for bf16, the monitor embeds in float32"):
        lewm.SurpriseMonitor(Ruler(), made, precision="float32")
    assert lewm.SurpriseMonitor(Ruler(), precision="float32").calibration is None, "another precision's is not taken"
    assert lewm.SurpriseMonitor(Ruler(), made, precision="auto").precision == "bf16"
    for native in ({"avx512_bf16": True}, {"amx_bf16": False, "avx2": True}, {}):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda native=native: native, raising=False)
        monitor = lewm.SurpriseMonitor(Ruler(), precision="auto")
        assert monitor.precision == ("bf16" if native.get("avx512_bf16") else "float32")
        assert (monitor.calibration == made) == (monitor.precision == "bf16")
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # versions without it
    assert lewm.SurpriseMonitor(Ruler(), precision="auto").precision == "float32"


def test_episodes_in_memory_calibrate_like_a_dataset(data: Path) -> None:
    with EpisodeStore(data) as store:
        lived = [
            (store.read_frames(np.arange(begin, begin + length)), store.actions[begin : begin + length - 1])
            for begin, length in zip(store.offsets.tolist(), store.lengths.tolist(), strict=True)
        ]
    monitor = lewm.SurpriseMonitor(Ruler())
    assert monitor.calibrate(lived, 0.05) == monitor.calibrate(data, 0.05)
    with pytest.raises(DataError, match="An episode is L frames"):
        monitor.calibrate([(lived[0][0], lived[0][1][1:])], 0.05)


def test_files_that_are_no_calibration_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    for content in ({"version": 1}, {"version": 7, "false_alarms": 0.1}, ["no"]):
        path.write_text(json.dumps(content))
        with pytest.raises(FileError, match="alibrate again"):
            lewm.SurpriseMonitor(Ruler(), path)
    calibrated(heavy_tailed(30, 0), "model", 1, 0.1).save(tmp_path / "new.json")
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    with pytest.raises(FileError, match="stays as it is"):
        calibrated(heavy_tailed(30, 0), "model", 1, 0.1).save(tmp_path / "notes.json")


def test_no_flipped_byte_gives_another_calibration(tmp_path: Path) -> None:
    path, made = tmp_path / "calibration.json", calibrated(heavy_tailed(30, 0), "model", 1, 0.1)
    made.save(path)
    content, rng = path.read_bytes(), np.random.default_rng(0)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            assert Calibration.load(path) == made, "white space may differ"
        except FileError:
            continue


def test_what_does_not_fit_is_refused() -> None:
    frame, action = np.zeros((SIDE, SIDE, 3), np.uint8), np.zeros(2)
    monitor = lewm.SurpriseMonitor(Ruler(), threshold=1.0)
    with pytest.raises(DataError, match="has no action before it"):
        monitor.step(frame, action)
    with pytest.raises(DataError, match="A frame is uint8"):
        monitor.step(frame.astype(np.float32))
    monitor.step(frame)
    with pytest.raises(DataError, match="Frame 1 of an episode needs the action"):
        monitor.step(frame)
    for wrong in (np.zeros(3), np.array([math.nan, 0])):
        with pytest.raises(DataError, match="2 finite numbers"):
            monitor.step(frame, wrong)
    assert monitor.step(frame, action).step == 1, "what was refused has left no trace"
    monitor.reset()
    assert monitor.step(frame).step == 0
    for threshold in (0.0, math.inf, -1):
        with pytest.raises(ConfigError, match="positive number"):
            lewm.SurpriseMonitor(Ruler(), threshold=threshold)
    with pytest.raises(ConfigError, match='precision is "auto", "float32" or "bf16"'):
        lewm.SurpriseMonitor(Ruler(), precision="half")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="every must divide"):
        lewm.SurpriseMonitor(Ruler(), every=2)
    actor = preset("debug", "gcbc").method.build(DataFacts())
    with pytest.raises(ConfigError, match="'gcbc' predicts no frames"):
        lewm.SurpriseMonitor(actor)
    with pytest.raises(ConfigError, match="in training mode"):
        lewm.SurpriseMonitor(Ruler().train())


def test_a_dataset_with_too_few_frames_says_what_fits(tmp_path: Path) -> None:
    path = episodes(tmp_path / "sparse.h5", 2, stride=5)
    with pytest.raises(DataError, match="every=5"):
        lewm.SurpriseMonitor(Ruler()).calibrate(path)
