"""The frozen evaluation pairs: where they come from, and that they stay what they are."""

from __future__ import annotations

import hashlib
import importlib.resources
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from lewm.data.formats.demonstrations import demonstrations_digest, load_demonstrations
from lewm.data.generate import HELD_OUT_SEED, generate_episode
from lewm.envs.registry import make_env
from lewm.errors import ConfigError, EnvError, FileError
from lewm.evaluate import manifest as manifest_module
from lewm.evaluate.manifest import PACKAGED, TUNING_EPISODE, build_manifest, load_manifest
from lewm.types import Demonstration, EpisodeSpec

# Changing the pairs changes every published number; this makes it a deliberate act.
PAIRS_SHA256 = {
    "tworoom": "9108cf81cee5769336c710c8df214d6e2cced7c038edef36a063d69b23f8fb32",
    "tworoom_strict": "9458d341409b82214cdb91159abecefddb5252c0b6bccc51cca773535ada79eb",
    "pusht": "c20bce3c354583759e3d9a60a02859e7204729aee26826b877778a07845ab577",
    "pusht_strict": "c2b25b4389957eaba8b93f2aba731afe940e5aeb4b76b7f96478ced0dd835022",
    "reacher": "585f52341c8d813522ed9f6d81be93b971f264322207b24cf54de2fde6a60fe0",
    "reacher_strict": "9435af082adfa8030dfe24d09b45a02c11d37f675312133be629b908012af73c",
    "cube": "281d8cb151eeb92de77e21f0934d184c497713874193cac2be272a1158d0e520",
    "cube_strict": "5171d37aa445d80d8223a140df972d8c3b8233f5fae22cae7f3fed37acdeb15f",
}
# The held-out episode that the last strict pair was cut from.
LAST_EPISODE = {"tworoom": 221, "pusht": 200, "reacher": 202, "cube": 270}
OFFSET, ENDS = 25, ("start", "goal")
ALL_ENVS = pytest.mark.parametrize("env_name", ["tworoom", "pusht", "reacher", "cube"])
ALL_MANIFESTS = pytest.mark.parametrize("name", PACKAGED)


def packaged_text(file_stem: str) -> str:
    return (importlib.resources.files("lewm.evaluate") / "manifests" / f"{file_stem}.json").read_text()


def packaged_document(file_stem: str) -> dict:
    return json.loads(packaged_text(file_stem))


def demonstrations_of(env_name: str) -> list[Demonstration] | None:
    """What the environment's held-out episodes are replays of, if of anything."""
    if env_name != "pusht":
        return None
    if not os.environ.get("LEWM_PUSHT_DEMOS"):
        pytest.skip("Push-T's pairs come from demonstrations: set LEWM_PUSHT_DEMOS to their file")
    return load_demonstrations(os.environ["LEWM_PUSHT_DEMOS"])


@pytest.mark.parametrize("file_stem", PAIRS_SHA256)
def test_the_pairs_are_frozen(file_stem: str):
    pairs = packaged_document(file_stem)["pairs"]
    assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest() == PAIRS_SHA256[file_stem]


def assert_a_pair_per_line(text: str):
    """JSON, in which the lines of the pairs are JSON too."""
    first = text.splitlines().index('  "pairs": [') + 1
    *lines, close_pairs, close_all = text.splitlines()[first:]
    assert [json.loads(line.removesuffix(",")) for line in lines] == json.loads(text)["pairs"]
    assert (close_pairs, close_all) == ("  ]", "}")


@pytest.mark.parametrize("file_stem", PAIRS_SHA256)
def test_packaged_files_have_a_pair_per_line(file_stem: str):
    assert_a_pair_per_line(packaged_text(file_stem))


@ALL_ENVS
@ALL_MANIFESTS
def test_the_pairs_can_be_posed(env_name: str, name: str):
    manifest = load_manifest(env_name, name)
    assert manifest.goal_offset == OFFSET
    assert [pair.index for pair in manifest.pairs] == list(range(200))
    with make_env(env_name, resolution=8) as env:
        for pair in manifest.pairs:
            env.set_goal(np.array(pair.goal))  # raises outside the state space
            env.set_state(np.array(pair.start))
            np.testing.assert_allclose(env.state, pair.start, rtol=1e-9, atol=1e-9)
            if name == "strict":
                assert not env.goal_reached()


@ALL_ENVS
def test_strict_goes_on_where_the_papers_pairs_end(env_name: str):
    """The paper's pairs that are not solved at the start are the first of the strict ones."""

    def start_and_goal(pairs: Sequence[EpisodeSpec]) -> list[tuple[tuple[float, ...], tuple[float, ...]]]:
        return [(pair.start, pair.goal) for pair in pairs]

    paper, strict = load_manifest(env_name).pairs, load_manifest(env_name, "strict").pairs
    with make_env(env_name, resolution=8) as env:
        unsolved = [pair for pair in paper if not env.is_success(np.array(pair.start), np.array(pair.goal))]
    assert 100 < len(unsolved) < 200
    assert start_and_goal(strict[: len(unsolved)]) == start_and_goal(unsolved)
    assert not set(start_and_goal(strict[len(unsolved) :])) & set(start_and_goal(paper))


@ALL_ENVS
@ALL_MANIFESTS
@pytest.mark.usefixtures("frozen_arithmetic")
def test_rebuilding_gives_the_pairs(env_name: str, name: str, tmp_path: Path):
    demonstrations, frozen = demonstrations_of(env_name), load_manifest(env_name, name)
    options = {"unsolved_only": name == "strict", "demonstrations": demonstrations}
    rebuilt = build_manifest(env_name, 3, OFFSET, tmp_path / "pairs.json", **options)
    assert rebuilt.environment == frozen.environment
    for pair, expected in zip(rebuilt.pairs, frozen.pairs, strict=False):
        # Another processor may round a simulation in another way.
        np.testing.assert_allclose(pair.start, expected.start, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(pair.goal, expected.goal, rtol=1e-6, atol=1e-6)


def cut_at(states: np.ndarray, pair: EpisodeSpec) -> int | None:
    """The row of an episode's states (L, state_dim) from which a pair was cut, if it was."""
    starts, goals = states[:-OFFSET], states[OFFSET:]
    rows = np.isclose(starts, pair.start).all(axis=1) & np.isclose(goals, pair.goal).all(axis=1)
    return int(np.argmax(rows)) if rows.any() else None


@ALL_ENVS
@pytest.mark.usefixtures("frozen_arithmetic")
def test_the_recorded_actions_lead_from_each_start_to_its_goal(env_name: str):
    demonstrations, pairs = demonstrations_of(env_name), list(load_manifest(env_name).first(4))
    with make_env(env_name, resolution=8) as env:
        for index in range(2 * len(pairs)):  # some episodes are too short to give a pair
            what = (env_name, env.resolution, HELD_OUT_SEED, index)
            episode = generate_episode(*what, demonstrations=demonstrations, draw=False)
            if not pairs or (first := cut_at(episode["state"], pairs[0])) is None:
                continue
            env.set_goal(np.array(pairs[0].goal))
            env.set_state(np.array(pairs[0].start))
            for action in episode["action"][first : first + OFFSET]:
                env.step(action)
            np.testing.assert_allclose(env.state, pairs.pop(0).goal, rtol=1e-6, atol=1e-6)
            assert env.goal_reached()
    assert not pairs, "an episode must be found for each pair"


@ALL_ENVS
@pytest.mark.usefixtures("frozen_arithmetic")
def test_the_frozen_pairs_end_before_the_tuning_ones_begin(env_name: str):
    """Episodes are numbered, and pairs cut in their order: it is enough to know where the longer manifest ends."""
    what = (env_name, 8, HELD_OUT_SEED, LAST_EPISODE[env_name])
    states = generate_episode(*what, demonstrations=demonstrations_of(env_name), draw=False)["state"]
    assert cut_at(states, load_manifest(env_name, "strict").pairs[-1]) is not None
    assert LAST_EPISODE[env_name] < TUNING_EPISODE


@ALL_MANIFESTS
def test_tuning_pairs_share_nothing_with_the_frozen_ones(name: str, tmp_path: Path):
    path = tmp_path / "tuning.json"
    tuning = build_manifest("tworoom", 200, OFFSET, path, name == "strict", first_episode=TUNING_EPISODE)
    assert json.loads(path.read_text())["first_episode"] == TUNING_EPISODE
    assert load_manifest("tworoom", path) == tuning
    assert len(tuning.pairs) == 200
    for end in ENDS:
        ours = {getattr(pair, end) for pair in tuning.pairs}
        frozen = {getattr(pair, end) for kind in PACKAGED for pair in load_manifest("tworoom", kind).pairs}
        assert len(ours) == 200
        assert not ours & frozen


def test_tuning_pairs_of_replays_share_nothing_either(tmp_path: Path):
    """Push-T's come from the same few demonstrations as the frozen ones, with other noise."""
    options = {"demonstrations": demonstrations_of("pusht"), "first_episode": TUNING_EPISODE}
    tuning = build_manifest("pusht", 50, OFFSET, tmp_path / "tuning.json", **options)
    for end in ENDS:
        frozen = {getattr(pair, end) for kind in PACKAGED for pair in load_manifest("pusht", kind).pairs}
        assert not {getattr(pair, end) for pair in tuning.pairs} & frozen


def test_pairs_begin_at_the_episode_that_is_asked_for(tmp_path: Path):
    first = TUNING_EPISODE + 7
    manifest = build_manifest("tworoom", 3, 8, tmp_path / "pairs.json", first_episode=first)
    episodes = [generate_episode("tworoom", 8, HELD_OUT_SEED, first + i, draw=False)["state"] for i in range(3)]
    for pair, states in zip(manifest.pairs, episodes, strict=True):
        assert tuple(pair.start) in set(map(tuple, states[:-8]))
        assert tuple(pair.goal) in set(map(tuple, states[8:]))


def run_tuning_script(*arguments: object) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).parents[2] / "runs" / "tuning_manifests.sh"
    environment = {name: value for name, value in os.environ.items() if name != "LEWM_PUSHT_DEMOS"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", str(script), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_script_writes_tuning_pairs_of_both_kinds(tmp_path: Path):
    done = run_tuning_script("tworoom", 12, tmp_path / "new")
    assert done.returncode == 0, done.stderr
    paths = [tmp_path / "new" / name for name in ("tworoom_tuning.json", "tworoom_tuning_strict.json")]
    assert done.stdout.split() == list(map(str, paths))
    for path, unsolved_only in zip(paths, (False, True), strict=True):
        options = {"unsolved_only": unsolved_only, "first_episode": TUNING_EPISODE}
        assert load_manifest("tworoom", path) == build_manifest(
            "tworoom", 12, OFFSET, tmp_path / "same.json", **options
        )


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ((), "usage: runs/tuning_manifests.sh ENV COUNT FOLDER"),
        (("tworoom", 0), "count and goal_offset must be at least 1, got 0 and 25."),
        (("twroom", 2), "Did you mean 'tworoom'?"),
        (("pusht", 2), "LEWM_PUSHT_DEMOS: is not set: name the Push-T demonstrations"),
    ],
)
def test_the_script_refuses_what_it_cannot_make(tmp_path: Path, arguments: Sequence[object], problem: str):
    done = run_tuning_script(*arguments, *([tmp_path] if arguments else []))
    assert done.returncode == 1
    assert problem in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@ALL_MANIFESTS
def test_pushts_block_has_to_move_in_most_pairs(name: str):
    starts, goals = (np.array([getattr(pair, end) for pair in load_manifest("pusht", name).pairs]) for end in ENDS)
    assert (np.linalg.norm((goals - starts)[:, 2:4], axis=1) > 1).sum() == 167


def test_pushts_pairs_name_their_demonstrations():
    demonstrations = demonstrations_of("pusht")
    for ending in PACKAGED.values():
        assert packaged_document(f"pusht{ending}")["demonstrations"] == demonstrations_digest(demonstrations)


def test_tworooms_pairs_make_sense():
    manifest, env = load_manifest("tworoom"), make_env("tworoom", resolution=8)
    assert manifest == load_manifest("lewm/TwoRoom-v0")
    assert manifest.environment == "lewm/TwoRoom-v0"
    assert manifest.goal_offset == 25
    assert [pair.index for pair in manifest.pairs] == list(range(200))
    starts, goals = (np.array([getattr(pair, name) for pair in manifest.pairs]) for name in ENDS)
    for states in (starts, goals):
        assert len(np.unique(states, axis=0)) == 200
        for state in states:
            env.set_state(state)  # raises where no agent can be
            np.testing.assert_array_equal(env.state, state)
    # 25 steps of at most 5 px along each axis.
    distance = np.abs(goals - starts).max(axis=1)
    assert distance.max() <= 25 * 5
    assert np.median(distance) > 16, "most pairs must not be solved at the start"


def test_rebuilding_tworooms_pairs_is_exact(tmp_path: Path):
    frozen = load_manifest("tworoom")
    path = tmp_path / "tworoom.json"
    rebuilt = build_manifest("tworoom", count=5, goal_offset=25, path=path)
    assert rebuilt.environment == frozen.environment
    assert rebuilt.pairs == frozen.pairs[:5]
    assert_a_pair_per_line(path.read_text())
    written = json.loads(path.read_text())
    assert [tuple(pair["goal"]) for pair in written["pairs"]] == [pair.goal for pair in frozen.pairs[:5]]


def test_the_first_pairs_are_a_prefix():
    manifest = load_manifest("tworoom")
    assert manifest.first(3) == manifest.pairs[:3]
    assert manifest.first(200) == manifest.pairs
    for count in (0, 201):
        with pytest.raises(ConfigError, match=rf"eval\.episodes is {count}.*has 200 pairs"):
            manifest.first(count)


@pytest.mark.parametrize("same", [None, "paper"])
def test_the_papers_pairs_are_the_default(same: str | None):
    assert load_manifest("tworoom", same) == load_manifest("tworoom")
    assert load_manifest("tworoom", "strict").pairs != load_manifest("tworoom").pairs


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(ConfigError, match=r"Unknown manifest 'strickt'\. Did you mean 'strict'\?.*Nor is there a file"):
        load_manifest("tworoom", "strickt")


def test_a_file_needs_no_suffix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    built = build_manifest("tworoom", count=2, goal_offset=25, path=Path("mine"))
    assert load_manifest("tworoom", "mine") == built


def test_unsolved_pairs_alone(tmp_path: Path):
    # So few steps that most pairs are solved at once.
    every, unsolved = (
        build_manifest("tworoom", 60, 8, tmp_path / "pairs.json", unsolved_only=only) for only in (False, True)
    )
    env = make_env("tworoom", resolution=8)
    solved = [bool(env.is_success(np.array(pair.start), np.array(pair.goal))) for pair in every.pairs]
    left = [pair.start for pair, done in zip(every.pairs, solved, strict=True) if not done]
    assert 5 < len(left) < 55
    assert [pair.start for pair in unsolved.pairs[: len(left)]] == left
    assert not any(env.is_success(np.array(pair.start), np.array(pair.goal)) for pair in unsolved.pairs)


@pytest.mark.parametrize("unsolved_only", [False, True])
def test_building_ends_where_no_pair_is_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unsolved_only: bool):
    monkeypatch.setattr(manifest_module, "PATIENCE", 20)
    # No episode has 500 steps; and where none moves by 16 px in one, each pair is solved at the start.
    offset = 1 if unsolved_only else 500
    with pytest.raises(ConfigError, match=rf"20 held-out episodes of tworoom .* goal {offset} steps after the start"):
        build_manifest("tworoom", 1, offset, tmp_path / "pairs.json", unsolved_only)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("count", "goal_offset"), [(0, 25), (1, 0)])
def test_a_manifest_has_pairs_and_distant_goals(tmp_path: Path, count: int, goal_offset: int):
    with pytest.raises(ConfigError, match="must be at least 1"):
        build_manifest("tworoom", count, goal_offset, tmp_path / "pairs.json")


def test_there_is_no_episode_before_the_first(tmp_path: Path):
    with pytest.raises(ConfigError, match="first_episode must be at least 0, got -1"):
        build_manifest("tworoom", 1, 25, tmp_path / "pairs.json", first_episode=-1)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "nowhere").touch()
    with pytest.raises(FileError, match=r"nowhere/pairs\.json cannot be written"):
        build_manifest("tworoom", 1, 25, tmp_path / "nowhere" / "pairs.json")


def test_an_unknown_environment_has_no_manifest():
    with pytest.raises(EnvError, match="Did you mean 'tworoom'"):
        load_manifest("tworooms")


def test_a_manifest_of_ones_own(tmp_path: Path):
    path = tmp_path / "mine.json"
    built = build_manifest("tworoom", count=2, goal_offset=50, path=path)
    assert load_manifest("tworoom", path) == built
    assert built.goal_offset == 50


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        "{}",
        '{"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": [{"start": [1, 2]}]}',
        '{"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": [{"start": [1, 2], "goal": ["a", 2]}]}',
        '{"environment": "lewm/TwoRoom-v0", "goal_offset": 25, "pairs": [{"start": [1, 2], "goal": 3}]}',
    ],
)
def test_a_malformed_manifest_is_refused(tmp_path: Path, text: str):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"mine\.json is no manifest.*Expected a JSON object"):
        load_manifest("tworoom", path)


def test_a_missing_manifest_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no manifest at .*mine\.json.*build_manifest"):
        load_manifest("tworoom", tmp_path / "mine.json")
