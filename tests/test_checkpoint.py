"""Model files: what is saved is what is loaded, and whatever does not fit together is noticed."""

from __future__ import annotations

import errno
import http.server
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lewm
from lewm import checkpoint
from lewm.cli import info
from lewm.errors import CheckpointError, FileError, LewmError
from lewm.export.writer import export_run
from lewm.files import file_digest, json_digest
from lewm.methods import files
from lewm.methods.lewm import LeWM
from lewm.presets import preset
from lewm.train.run import Run
from lewm.types import ActionStats, DataFacts

STATS = ActionStats(mean=(0.25, -1.5), std=(2.0, 0.125))


def random_model(seed: int = 0, recorded: torch.Tensor | None = None) -> LeWM:
    torch.manual_seed(seed)
    return LeWM(preset("debug").method, DataFacts(STATS, recorded)).eval()


def same_weights(a: LeWM, b: LeWM) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def load(directory: Path) -> LeWM:
    return LeWM.from_pretrained(directory, device="cpu")


def rewrite_config(directory: Path, **changes: Any) -> None:
    """Change what a saved model's description says, with the digest that such a description has."""
    path = directory / checkpoint.CONFIG
    document = json.loads(path.read_text()) | changes
    document["digest"] = json_digest({name: value for name, value in document.items() if name != "digest"})
    path.write_text(json.dumps(document))


def rewrite_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a saved model and let config.json vouch for the result."""
    path = directory / checkpoint.WEIGHTS
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    rewrite_config(directory, files={checkpoint.WEIGHTS: file_digest(path)})


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return random_model().save_pretrained(tmp_path / "model")


# -- a pair of files ----------------------------------------------------------------------------------------


@torch.inference_mode()
def test_a_loaded_model_is_the_saved_one(tmp_path: Path) -> None:
    model = random_model()
    # One training step's worth of BatchNorm statistics: buffers travel too.
    model.train().encode(torch.randint(0, 256, (4, 28, 28, 3), dtype=torch.uint8))
    model.eval()
    model.save_pretrained(tmp_path / "model", extra={"note": "kept"})
    loaded = load(tmp_path / "model")

    frames = torch.randint(0, 256, (2, 3, 28, 28, 3), dtype=torch.uint8)
    past, actions = torch.randn(2, 2, 10), torch.randn(2, 4, 5, 10)
    z = model.encode(frames)
    assert torch.equal(loaded.encode(frames), z)
    assert torch.equal(loaded.rollout(z, past, actions), model.rollout(z, past, actions))
    assert loaded.action_stats == STATS
    assert loaded.settings == model.settings
    assert not loaded.training
    assert json.loads((tmp_path / "model" / "config.json").read_text())["note"] == "kept"
    assert sorted(p.name for p in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


def test_a_model_without_statistics_loads_without_them(tmp_path: Path) -> None:
    LeWM(preset("debug").method).save_pretrained(tmp_path)
    assert load(tmp_path).action_stats is None


def test_recorded_actions_come_along(tmp_path: Path) -> None:
    recorded = torch.randn(6, 4, 2)
    random_model(0, recorded).save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.recorded_actions is not None
    assert torch.equal(loaded.recorded_actions, recorded)
    # A model without them in the same place: the old file is there, and is not the new model's.
    random_model(1).save_pretrained(tmp_path, extra=json.loads((tmp_path / checkpoint.CONFIG).read_text()))
    assert (tmp_path / checkpoint.ACTIONS).is_file()
    assert load(tmp_path).recorded_actions is None


def test_recorded_actions_of_another_model_are_refused(tmp_path: Path) -> None:
    for seed, name in enumerate(("one", "other")):
        random_model(seed, torch.randn(6, 4, 2)).save_pretrained(tmp_path / name)
    (tmp_path / "other" / checkpoint.ACTIONS).replace(tmp_path / "one" / checkpoint.ACTIONS)
    with pytest.raises(CheckpointError, match=r"actions\.safetensors does not belong to its config\.json"):
        load(tmp_path / "one")
    with pytest.raises(CheckpointError, match=r"actions\.safetensors is missing"):
        load(tmp_path / "other")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such modes")
def test_whoever_may_read_the_description_may_read_the_weights(saved: Path) -> None:
    modes = {path.name: path.stat().st_mode for path in saved.iterdir()}
    assert modes["model.safetensors"] == modes["config.json"]


def test_a_missing_tensor_is_named(saved: Path) -> None:
    rewrite_weights(saved, lambda tensors: tensors.pop("encoder.cls_token"))
    with pytest.raises(CheckpointError, match=r"missing encoder\.cls_token"):
        load(saved)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(saved: Path, tmp_path: Path, number: float, kind: torch.dtype) -> None:
    """By everyone who loads: to plan, to say what is there, to export."""

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["encoder.positions"] = tensors["encoder.positions"].to(kind)
        tensors["encoder.positions"].view(-1)[3] = number

    rewrite_weights(saved, spoil)
    for use in (load, lambda folder: info.model(str(folder)), lambda folder: export_run(folder, tmp_path / "out")):
        with pytest.raises(CheckpointError, match=r"not all finite numbers: encoder\.positions\. Train"):
            use(saved)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("tensors", "found"),
    [
        ({"sequences": torch.full((6, 4, 2), torch.nan)}, "some that are not finite"),
        ({"sequences": torch.zeros(6, 4, 3)}, r"of shape \(6, 4, 3\)"),
        ({"sequences": torch.zeros(6, 4, 2, dtype=torch.int64)}, "torch.int64"),
        ({"others": torch.zeros(6, 4, 2)}, r"of shape \(0,\)"),
    ],
)
def test_recorded_actions_that_are_none_are_refused(tmp_path: Path, tensors: dict[str, Any], found: str) -> None:
    model = random_model()
    content = {checkpoint.WEIGHTS: model.own_state(), checkpoint.ACTIONS: tensors}
    checkpoint.save_model(tmp_path / "model", content, files.describe(model))
    with pytest.raises(CheckpointError, match=rf"{checkpoint.ACTIONS} must hold finite float32 numbers.*{found}"):
        load(tmp_path / "model")


@pytest.mark.parametrize(
    ("mean", "std"),
    [
        ([0.1, 0.2], [1.0, 0.0]),
        ([0.1, 0.2], [1.0, -1.0]),
        ([0.1, 0.2], [1.0, 1e-50]),  # which is 0 as float32
        ([0.1, 1e300], [1.0, 1.0]),
        ([0.1, float("nan")], [1.0, 1.0]),
        ([0.1], [1.0]),
        ([0.1, 0.2, 0.3], [1.0, 1.0, 1.0]),
        ([0.1, 0.2], [1.0]),
    ],
)
def test_statistics_that_give_no_finite_actions_are_refused(saved: Path, mean: list[float], std: list[float]) -> None:
    facts = json.loads((saved / checkpoint.CONFIG).read_text())["facts"]
    rewrite_config(saved, facts=facts | {"actions": {"mean": mean, "std": std}})
    with pytest.raises(CheckpointError, match=r"config\.json: facts\.actions"):
        load(saved)


def test_an_extra_tensor_is_named(saved: Path) -> None:
    rewrite_weights(saved, lambda tensors: tensors.update(decoder=torch.zeros(1)))
    with pytest.raises(CheckpointError, match="unexpected decoder"):
        load(saved)


def test_a_misshapen_tensor_is_named_with_both_shapes(saved: Path) -> None:
    rewrite_weights(saved, lambda tensors: tensors.update({"encoder.norm.bias": torch.zeros(3)}))
    with pytest.raises(CheckpointError, match=r"encoder\.norm\.bias has shape \(3,\) instead of \(16,\)"):
        load(saved)


def test_a_newer_format_asks_for_an_upgrade(saved: Path) -> None:
    rewrite_config(saved, format_version=checkpoint.FORMAT_VERSION + 1, lewm_version="99.0")
    with pytest.raises(CheckpointError, match=r"lewm 99\.0 in format 3.*pip install --upgrade lewm"):
        load(saved)


def test_weights_of_another_model_are_noticed(saved: Path, tmp_path: Path) -> None:
    other = random_model(seed=1).save_pretrained(tmp_path / "other")
    shutil.copy(other / checkpoint.WEIGHTS, saved / checkpoint.WEIGHTS)
    with pytest.raises(CheckpointError, match="SHA-256 differs"):
        load(saved)


@pytest.mark.parametrize("end", [0, 4, 1000, -1], ids=["empty", "in size", "in header", "in data"])
def test_truncated_weights_are_noticed(saved: Path, end: int) -> None:
    path = saved / checkpoint.WEIGHTS
    path.write_bytes(path.read_bytes()[:end])
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        load(saved)


def test_a_folder_without_its_description_is_refused(saved: Path) -> None:
    (saved / checkpoint.CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors and config\.json"):
        load(saved)
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        checkpoint.load_document(saved)


@pytest.mark.parametrize("text", ['{"_target_": "stable_worldmodel.wm.lewm.LeWM"}', "[]", '{"format": "lewm"}'])
def test_a_description_of_something_else_is_refused(saved: Path, text: str) -> None:
    (saved / checkpoint.CONFIG).write_text(text)
    with pytest.raises(CheckpointError, match=r"does not describe a lewm model.*import-official"):
        load(saved)


def test_a_description_that_is_not_json_is_refused(saved: Path) -> None:
    (saved / checkpoint.CONFIG).write_text('{"format": "le')
    with pytest.raises(FileError, match=r"config\.json cannot be read"):
        load(saved)


def test_a_description_without_a_model_is_refused(saved: Path) -> None:
    """Of the first version, whose descriptions have no digest."""
    (saved / checkpoint.CONFIG).write_text(json.dumps({"format": "lewm", "format_version": 1}))
    with pytest.raises(CheckpointError, match="no 'model' section"):
        load(saved)


# -- disks that fail ----------------------------------------------------------------------------------------


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("fails_at", range(4), ids=["weights", "sync weights", "sync config", "config"])
def test_a_full_disk_leaves_the_previous_model_loadable(
    saved: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    with monkeypatch.context() as patch:
        if fails_at == 0:
            patch.setattr(Path, "write_bytes", disk_full)
        elif fails_at == 3:
            patch.setattr(Path, "write_text", disk_full)
        else:
            syncs = iter([os.fsync] * (fails_at - 1) + [disk_full])
            patch.setattr(os, "fsync", lambda descriptor: next(syncs)(descriptor))
        with pytest.raises(FileError, match="disk is full"):
            random_model(seed=1).save_pretrained(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before
    assert same_weights(load(saved), random_model())


def test_a_place_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    for place in (tmp_path / "file", tmp_path / "file" / "model"):
        with pytest.raises(FileError, match="cannot be written"):
            random_model().save_pretrained(place)
    assert (tmp_path / "file").read_text() == "precious"


def test_a_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    def half(folder: Path) -> None:
        (folder / "first").write_text("1")
        disk_full()

    target = tmp_path / "checkpoints" / "step_00000001"
    with pytest.raises(FileError, match="disk is full"):
        checkpoint.write_folder(target, half)
    assert list(target.parent.iterdir()) == []

    checkpoint.write_folder(target, lambda folder: (folder / "whole").touch())
    with pytest.raises(FileError, match="disk is full"):
        checkpoint.write_folder(target, half)
    assert [path.relative_to(target.parent) for path in target.parent.rglob("*")] == [
        Path(target.name),
        Path(target.name, "whole"),
    ]


# -- a byte that changed ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_run(debug_run: Path) -> Path:
    """A run's checkpoint, with all four files."""
    folder = checkpoint.resolve(debug_run)
    names = (checkpoint.ACTIONS, checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.OPTIMIZER)
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    return folder


@pytest.mark.parametrize("name", [checkpoint.ACTIONS, checkpoint.CONFIG, checkpoint.WEIGHTS, checkpoint.OPTIMIZER])
def test_a_byte_that_changed_is_noticed_in_the_file_where_it_is(whole_run: Path, tmp_path: Path, name: str) -> None:
    """At random places, half of them in the header of tensors. White space in place of white space harms nothing."""
    folder = Path(shutil.copytree(whole_run, tmp_path / "model"))
    good, rng = files.identity(lewm.load(folder, "cpu")), random.Random(name)
    whole = (folder / name).read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little") if name != checkpoint.CONFIG else len(whole)
    refused = 0
    for number in range(60):
        place = rng.randrange(header if number % 2 else len(whole))
        changed = whole[:place] + bytes([whole[place] ^ rng.randrange(1, 256)]) + whole[place + 1 :]
        (folder / name).write_bytes(changed)
        try:
            assert files.identity(lewm.load(folder, "cpu")) == good
            Run.read(folder)
        except LewmError as error:
            refused += name in str(error)
    assert refused > 50 if name == checkpoint.CONFIG else refused == 60


# -- where models are found -----------------------------------------------------------------------------------


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path: Path) -> None:
    steps = [500, 1000, 20000]
    for seed, step in enumerate(steps):
        random_model(seed).save_pretrained(tmp_path / "checkpoints" / f"step_{step:08d}")
    (tmp_path / "checkpoints" / ".step_00030000.tmp").mkdir()  # what an interrupted save leaves behind
    assert same_weights(load(tmp_path), random_model(seed=2))
    checkpoint.prune(tmp_path / "checkpoints", keep=2, newest=20000)
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("step_*"))
    assert kept == ["step_00001000", "step_00020000"]


def test_a_place_that_holds_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="nor a run's checkpoints"):
        load(tmp_path)


class Hub(http.server.ThreadingHTTPServer):
    """The part of the Hugging Face hub that a download needs, serving one folder as ``user/repo``."""

    COMMIT = "0123456789abcdef0123456789abcdef01234567"

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubRequest)
        self.folder = folder
        self.downloaded: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubRequest(http.server.BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: object) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        path = self.path.partition("?")[0]
        files = self.server.folder
        model, resolve = "/api/models/user/repo", f"/user/repo/resolve/{Hub.COMMIT}/"
        if path in (model, f"{model}/revision/main"):
            siblings = [{"rfilename": file.name} for file in files.iterdir()]
            self.answer_json({"id": "user/repo", "sha": Hub.COMMIT, "siblings": siblings})
        elif path == f"{model}/tree/{Hub.COMMIT}":
            sizes = [(file.name, file.stat().st_size) for file in files.iterdir()]
            self.answer_json([{"type": "file", "path": name, "size": n, "oid": name} for name, n in sizes])
        elif path.startswith(resolve):
            name = path.removeprefix(resolve)
            self.server.downloaded.add(name)
            self.answer(200, (files / name).read_bytes(), {"ETag": f'"{name}"'})
        else:
            self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})

    do_GET = do_HEAD

    def answer_json(self, document: Any) -> None:
        self.answer(200, json.dumps(document).encode(), {"Content-Type": "application/json"})

    def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "X-Repo-Commit": Hub.COMMIT, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


@pytest.fixture
def hub(saved: Path) -> Iterator[Hub]:
    (saved / "README.md").write_text("not needed")
    with Hub(saved) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


FETCH = """
import sys
from lewm.errors import CheckpointError
from lewm.methods import files
from lewm.methods.lewm import LeWM
for repo in sys.argv[2:]:
    try:
        LeWM.from_pretrained(repo, device="cpu").save_pretrained(sys.argv[1])
        print("loaded", repo)
    except CheckpointError as error:
        print("refused", repo, str(error).replace(chr(10), " "))
"""


def fetch(endpoint: str, folder: Path, *repos: str) -> list[str]:
    """Load models through the real client, which reads its settings on import and so needs a process of its own.

    Returns one line per repository; the last model loaded is saved to ``folder / "fetched"``.
    """
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / "hf"),
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": str(Path(lewm.__file__).parents[1]),
    }
    command = [sys.executable, "-c", FETCH, str(folder / "fetched"), *repos]
    result = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_a_repository_is_fetched_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    loaded, missing, misnamed = fetch(hub.url, tmp_path, "user/repo", "user/nothing", "user/two--dashes")
    assert loaded == "loaded user/repo"
    assert same_weights(load(tmp_path / "fetched"), random_model())
    assert hub.downloaded == {"config.json", "model.safetensors"}
    for refused in (missing, misnamed):
        assert refused.startswith("refused user/")
        assert "could not be fetched as a Hugging Face repository" in refused


def test_an_unreachable_hub_is_an_error_a_user_can_read(tmp_path: Path) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        (line,) = fetch(f"http://127.0.0.1:{reserved.getsockname()[1]}", tmp_path, "user/repo")
    assert line.startswith("refused user/repo 'user/repo' is not a folder here, and could not be fetched")
