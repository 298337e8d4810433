"""The authors' checkpoints: our network computes theirs, and an import that does not fit exactly is refused.

Theirs is the public package's own network around Hugging Face's ViT, with random weights everywhere.
"""

from __future__ import annotations

import copy
import errno
import importlib.util
import json
import re
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import lewm
from lewm import checkpoint, cli
from lewm.config import Config
from lewm.data.stats import action_stats, recorded_actions
from lewm.data.store import EpisodeStore
from lewm.errors import CheckpointError, FileError, PlanningError
from lewm.evaluate.runner import evaluate
from lewm.methods.lewm import LeWM, LeWMConfig
from lewm.methods.official import import_official
from lewm.model.vit import IMAGENET_MEAN, IMAGENET_STD
from lewm.types import ActionStats, DataFacts

NEEDED = "the networks to compare with are installed by `make test`"
transformers = pytest.importorskip("transformers", reason=NEEDED)
pytest.importorskip("einops", reason=NEEDED)

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}

MLP = {
    "_target_": "stable_worldmodel.wm.lewm.module.MLP",
    "input_dim": 192,
    "output_dim": 192,
    "hidden_dim": 2048,
    "norm_fn": {"_target_": "torch.nn.BatchNorm1d", "_partial_": True},
}
RELEASED = {
    "_target_": "stable_worldmodel.wm.lewm.LeWM",
    "encoder": {
        "_target_": "stable_pretraining.backbone.utils.vit_hf",
        "size": "tiny",
        "patch_size": 14,
        "image_size": 224,
        "pretrained": False,
        "use_mask_token": False,
    },
    "predictor": {
        "_target_": "stable_worldmodel.wm.lewm.module.Predictor",
        "num_frames": 3,
        "input_dim": 192,
        "hidden_dim": 192,
        "output_dim": 192,
        "depth": 6,
        "heads": 16,
        "mlp_dim": 2048,
        "dim_head": 64,
        "dropout": 0.1,
        "emb_dropout": 0.0,
    },
    "action_encoder": {"_target_": "stable_worldmodel.wm.lewm.module.Embedder", "input_dim": 10, "emb_dim": 192},
    "projector": MLP,
    "pred_proj": dict(MLP),
}

# (transformers 4, transformers 5), in an order that works in both directions.
VIT_SPELLINGS = [
    ("encoder.encoder.layer.", "encoder.layers."),
    (".attention.attention.query.", ".attention.q_proj."),
    (".attention.attention.key.", ".attention.k_proj."),
    (".attention.attention.value.", ".attention.v_proj."),
    (".attention.output.dense.", ".attention.o_proj."),
    (".intermediate.dense.", ".mlp.fc1."),
    (".output.dense.", ".mlp.fc2."),
]


def changed(**fields: Any) -> dict[str, Any]:
    """The released configuration with fields, written section__field, replaced."""
    config = copy.deepcopy(RELEASED)
    for path, value in fields.items():
        section, field = path.split("__")
        config[section][field] = value
    return config


def public_module(name: str) -> types.ModuleType:
    """A module of the public package, loaded past its ``__init__``, which needs much that is not installed."""
    package = importlib.util.find_spec("stable_worldmodel")
    if package is None or not package.submodule_search_locations:
        pytest.skip(f"stable-worldmodel is not installed: {NEEDED}")
    path = Path(package.submodule_search_locations[0], "wm", "lewm", f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"public_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_public(config: dict[str, Any]) -> torch.nn.Module:
    """The public network that ``config`` describes, in evaluation mode, every number of it random."""
    torch.manual_seed(0)
    module = public_module("module")
    arguments = {
        name: {key: value for key, value in section.items() if key not in ("_target_", "norm_fn")}
        for name, section in config.items()
        if isinstance(section, dict)
    }
    vit = transformers.ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=config["encoder"]["image_size"],
        patch_size=config["encoder"]["patch_size"],
    )
    model = public_module("lewm").LeWM(
        encoder=transformers.ViTModel(vit, add_pooling_layer=False, use_mask_token=False),
        predictor=module.Predictor(**arguments["predictor"]),
        action_encoder=module.Embedder(**arguments["action_encoder"]),
        projector=module.MLP(**arguments["projector"], norm_fn=torch.nn.BatchNorm1d),
        pred_proj=module.MLP(**arguments["pred_proj"], norm_fn=torch.nn.BatchNorm1d),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_(std=0.3)
            elif name.endswith("running_var"):
                buffer.uniform_(0.5, 1.5)
    return model.eval()


def respell(tensors: dict[str, torch.Tensor], version: int) -> dict[str, torch.Tensor]:
    """The same state dict as the given major version of transformers would have named it."""
    respelled = {}
    for name, tensor in tensors.items():
        for old, new in VIT_SPELLINGS if name.startswith("encoder.") else []:
            name = name.replace(old, new) if version == 5 else name.replace(new, old)
        respelled[name] = tensor
    return respelled


def write(folder: Path, tensors: Any, config: Any) -> tuple[Path, Path]:
    folder.mkdir(exist_ok=True)
    torch.save(tensors, folder / "weights.pt")
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "weights.pt", folder / "config.json"


@pytest.fixture(scope="module")
def public() -> torch.nn.Module:
    return build_public(RELEASED)


@pytest.fixture(scope="module")
def imported(public: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> LeWM:
    """The public network after an import."""
    folder = tmp_path_factory.mktemp("official")
    weights, config = write(folder, public.state_dict(), RELEASED)
    return LeWM.from_pretrained(import_official(weights, config, folder / "out"), device="cpu")


@pytest.fixture(scope="module")
def small() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """A state dict and configuration that import cleanly and are quick to write."""
    config = changed(encoder__image_size=28, predictor__depth=1, projector__hidden_dim=32, pred_proj__hidden_dim=32)
    return build_public(config).state_dict(), config


def random_frames(*leading: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (*leading, 224, 224, 3), dtype=torch.uint8, generator=generator)


def as_public_pixels(frames: torch.Tensor) -> torch.Tensor:
    """uint8 (..., R, R, 3) -> the normalised float (..., 3, R, R) that the public network takes."""
    x = (frames.float() / 255 - torch.tensor(IMAGENET_MEAN)) / torch.tensor(IMAGENET_STD)
    return x.movedim(-1, -3)


def assert_identical(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# -- parity -----------------------------------------------------------------------------------------------


def test_the_released_configuration_is_our_default(public: torch.nn.Module, imported: LeWM) -> None:
    assert imported.settings == LeWMConfig()
    assert len(public.state_dict()) == 303
    assert len(imported.state_dict()) == 255
    for model in (public, imported):
        assert sum(p.numel() for p in model.parameters()) == 18_034_478


@torch.inference_mode()
def test_the_vit_matches_hugging_face(public: torch.nn.Module, imported: LeWM) -> None:
    frames = random_frames(3)
    theirs = public.encoder(as_public_pixels(frames)).last_hidden_state[:, 0]
    ours = imported.encoder(frames)
    assert theirs.std(dim=0).mean() > 0.01  # the frames are told apart, so agreement means something
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


@torch.inference_mode()
def test_embeddings_match_the_public_network(public: torch.nn.Module, imported: LeWM) -> None:
    frames = random_frames(2, 2)
    theirs = public.encode({"pixels": as_public_pixels(frames)})["emb"]
    assert theirs.std(dim=(0, 1)).mean() > 0.01
    torch.testing.assert_close(imported.encode(frames), theirs, **TOLERANCE)


@pytest.mark.parametrize("context", [1, 3])
@torch.inference_mode()
def test_rollouts_match_the_public_network(public: torch.nn.Module, imported: LeWM, context: int) -> None:
    samples, horizon = 3, 5
    frames = random_frames(2, context)
    torch.manual_seed(2)
    past = torch.randn(2, context - 1, 10)
    actions = torch.randn(2, samples, horizon, 10)

    pixels = as_public_pixels(frames).unsqueeze(1).expand(-1, samples, -1, -1, -1, -1)
    sequence = torch.cat([past.unsqueeze(1).expand(-1, samples, -1, -1), actions], dim=2)
    theirs = public.rollout({"pixels": pixels}, sequence)["predicted_emb"][:, :, context:]

    ours = imported.rollout(imported.encode(frames), past, actions)
    assert theirs.shape == (2, samples, horizon, 192)
    assert theirs.std(dim=1).mean() > 0.01  # different actions lead to different futures
    torch.testing.assert_close(ours, theirs, **TOLERANCE)


def test_both_spellings_of_the_encoder_import_to_the_same_weights(small: Any, tmp_path: Path) -> None:
    imports = {}
    for version in (4, 5):
        tensors = respell(small[0], version)
        assert ("encoder.encoder.layer.0.attention.attention.query.weight" in tensors) == (version == 4)
        files = write(tmp_path / str(version), tensors, small[1])
        out = import_official(*files, tmp_path / str(version) / "out")
        imports[version] = LeWM.from_pretrained(out, "cpu").state_dict()
    assert_identical(imports[4], imports[5])


# -- what an import writes --------------------------------------------------------------------------------


def test_import_records_its_source_and_the_action_statistics(small: Any, tmp_path: Path) -> None:
    stats = ActionStats(mean=(0.5, -1.0), std=(2.0, 0.25))
    out = import_official(*write(tmp_path / "official", *small), tmp_path / "out", DataFacts(stats))
    assert LeWM.from_pretrained(out, device="cpu").action_stats == stats
    assert json.loads((out / "config.json").read_text())["imported_from"] == "weights.pt"


def test_a_dataset_gives_statistics_and_recorded_actions(small: Any, tmp_path: Path, debug_config: Config) -> None:
    assert debug_config.data is not None
    files, out = write(tmp_path / "official", *small), tmp_path / "out"
    assert cli.run(["import-official", *map(str, files), str(out), "--dataset", str(debug_config.data)]) == 0
    model = LeWM.from_pretrained(out, device="cpu")
    with EpisodeStore(debug_config.data) as store:
        assert model.action_stats == action_stats(store.actions)
        everything = recorded_actions(store.actions, store.lengths, np.arange(store.num_episodes))
    assert model.recorded_actions is not None
    assert np.array_equal(model.recorded_actions.numpy(), everything)


def test_an_import_records_the_world(small: Any, tmp_path: Path, debug_config: Config) -> None:
    """That of --env, by whichever of its names; else that of the dataset."""
    files = [str(path) for path in write(tmp_path / "official", *small)]
    data = ["--dataset", str(debug_config.data)]
    worlds = {
        "named": (["--env", "pusht"], "lewm/PushT-v0"),
        "id": (["--env", "lewm/PushT-v0"], "lewm/PushT-v0"),
        "dataset": (data, "lewm/TwoRoom-v0"),
        "both": ([*data, "--env", "tworoom"], "lewm/TwoRoom-v0"),
        "neither": ([], None),
    }
    for name, (options, environment) in worlds.items():
        out = tmp_path / name
        assert cli.run(["import-official", *files, str(out), *options]) == 0
        assert lewm.load(out, "cpu").facts.environment == environment
        assert json.loads((out / "config.json").read_text())["facts"]["environment"] == environment


def test_an_import_for_a_world_that_does_not_exist_is_refused(
    small: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [str(path) for path in write(tmp_path / "official", *small)]
    assert cli.run(["import-official", *files, str(tmp_path / "out"), "--env", "mars"]) == 1
    assert "Unknown environment 'mars'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_imported_model_is_not_evaluated_in_another_world(small: Any, tmp_path: Path, debug_config: Config) -> None:
    files = [str(path) for path in write(tmp_path / "official", *small)]
    out = tmp_path / "out"
    assert cli.run(["import-official", *files, str(out), "--dataset", str(debug_config.data), "--env", "pusht"]) == 0
    with pytest.raises(PlanningError, match=r"trained in lewm/PushT-v0, and lewm/TwoRoom-v0 is another world"):
        evaluate(lewm.load(out, "cpu"), debug_config)


def test_a_safetensors_file_imports_like_a_pt_file(small: Any, tmp_path: Path) -> None:
    weights, config = write(tmp_path / "official", *small)
    tensors = {name: tensor.contiguous() for name, tensor in small[0].items()}
    save_file(tensors, weights.with_suffix(".safetensors"))
    from_pt = LeWM.from_pretrained(import_official(weights, config, tmp_path / "pt"), "cpu").state_dict()
    other = import_official(weights.with_suffix(".safetensors"), config, tmp_path / "safetensors")
    from_safetensors = LeWM.from_pretrained(other, "cpu").state_dict()
    assert_identical(from_pt, from_safetensors)


def test_frame_skip_divides_the_action_block(small: Any, tmp_path: Path) -> None:
    weights, config = write(tmp_path / "official", *small)
    model = LeWM.from_pretrained(import_official(weights, config, tmp_path / "out", frame_skip=2), "cpu")
    assert (model.frame_skip, model.action_dim) == (2, 5)
    with pytest.raises(CheckpointError, match=r"input_dim = 10.*frame_skip"):
        import_official(weights, config, tmp_path / "refused", frame_skip=3)
    assert not (tmp_path / "refused").exists()


# -- what an import refuses -------------------------------------------------------------------------------


def check_refused(tmp_path: Path, tensors: Any, config: Any, message: str) -> None:
    weights, config_path = write(tmp_path / "official", tensors, config)
    with pytest.raises(CheckpointError, match=message):
        import_official(weights, config_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("version", [4, 5])
def test_a_renamed_tensor_is_refused_by_both_its_names(small: Any, tmp_path: Path, version: int) -> None:
    tensors = respell(small[0], version)
    name = respell({"encoder.layers.3.attention.k_proj.bias": torch.empty(0)}, version).popitem()[0]
    tensors["encoder.renamed"] = tensors.pop(name)
    check_refused(tmp_path, tensors, small[1], f"missing {name}; unexpected encoder.renamed")


def test_a_missing_tensor_is_refused(small: Any, tmp_path: Path) -> None:
    tensors = dict(small[0])
    del tensors["projector.net.1.running_var"]
    check_refused(tmp_path, tensors, small[1], r"missing projector\.net\.1\.running_var")


def test_an_extra_tensor_is_refused(small: Any, tmp_path: Path) -> None:
    tensors = small[0] | {"encoder.embeddings.mask_token": torch.zeros(1, 1, 192)}
    check_refused(tmp_path, tensors, small[1], r"unexpected encoder\.embeddings\.mask_token")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("encoder.embeddings.patch_embeddings.projection.weight", (192, 588)),
        ("action_encoder.patch_embed.weight", (10, 10)),
        ("predictor.transformer.layers.0.attn.to_qkv.weight", (192, 3072)),
        ("encoder.layernorm.weight", (191,)),
    ],
)
def test_a_misshapen_tensor_is_refused(small: Any, tmp_path: Path, name: str, shape: tuple[int, ...]) -> None:
    message = rf"{name} has shape \({', '.join(map(str, shape))},?\)"
    check_refused(tmp_path, small[0] | {name: torch.zeros(shape)}, small[1], message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("encoder.size", "giant"),
        ("predictor.emb_dropout", 0.1),
        ("projector.norm_fn", "LayerNorm"),
        ("projector.norm_fn", {"_target_": "torch.nn.BatchNorm1d", "eps": 0.1}),
        ("pred_proj.act_fn", "ReLU"),
    ],
)
def test_a_configuration_we_cannot_represent_is_refused_by_field_and_value(
    tmp_path: Path, field: str, value: Any
) -> None:
    config = changed(**{field.replace(".", "__"): value})
    check_refused(tmp_path, {}, config, re.escape(f"{field} = {value!r}"))


def test_a_configuration_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    check_refused(tmp_path, {}, changed(encoder__patch_size=15), "multiple of 15")
    check_refused(tmp_path, {}, changed(encoder__patch_size="14"), "cannot be built")
    check_refused(tmp_path, {}, changed(predictor__depth="${depth}"), "cannot be built")
    config = changed()
    del config["predictor"]["depth"]
    check_refused(tmp_path, {}, config, r"no predictor\.depth")
    check_refused(tmp_path, {}, {"encoder": config["encoder"]}, r"no predictor\.")
    check_refused(tmp_path, {}, [1], r"no encoder\.size")


@pytest.mark.parametrize(
    ("field", "value"), [("predictor.hidden_dim", 256), ("action_encoder.mlp_scale", 2), ("pred_proj.hidden_dim", 64)]
)
def test_a_network_of_other_shapes_is_refused_by_its_tensors(
    small: Any, tmp_path: Path, field: str, value: int
) -> None:
    """What the configuration says and is not read for shows in the weights that such a network would have."""
    tensors, config = small
    wide = dict(tensors)
    prefix = {"predictor.hidden_dim": "predictor.", "action_encoder.mlp_scale": "action_encoder.embed."}
    name = next(n for n in wide if n.startswith(prefix.get(field, "pred_proj.")) and wide[n].dim() == 2)
    wide[name] = torch.zeros(wide[name].shape[0] + value, wide[name].shape[1])
    check_refused(tmp_path, wide, config, re.escape(name))


def test_statistics_of_other_actions_are_refused(small: Any, tmp_path: Path) -> None:
    weights, config = write(tmp_path / "official", *small)
    with pytest.raises(CheckpointError, match="3 numbers per action"):
        import_official(weights, config, tmp_path / "out", DataFacts(ActionStats((0.0,) * 3, (1.0,) * 3)))
    assert not (tmp_path / "out").exists()


def test_files_that_are_missing_or_damaged_are_refused(small: Any, tmp_path: Path) -> None:
    weights, config = write(tmp_path / "official", *small)
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match="is missing"):
        import_official(tmp_path / "nothing.pt", config, out)
    with pytest.raises(CheckpointError, match="is missing"):
        import_official(tmp_path / "nothing.safetensors", config, out)
    with pytest.raises(FileError, match="cannot be read"):
        import_official(weights, tmp_path / "nothing.json", out)
    whole = weights.read_bytes()
    for damaged in (b"", b"not a pickle", whole[: len(whole) // 2]):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged or not a plain state dict"):
            import_official(weights, config, out)
    assert not out.exists()


def test_weights_that_are_not_a_state_dict_are_refused(small: Any, tmp_path: Path) -> None:
    check_refused(tmp_path, torch.zeros(3), small[1], "not a plain state dict")
    check_refused(tmp_path, {"state_dict": small[0]}, small[1], "not a plain state dict")
    check_refused(tmp_path, torch.nn.Linear(1, 1), small[1], "not a plain state dict")


def test_a_folder_in_use_is_not_overwritten(small: Any, tmp_path: Path) -> None:
    weights, config = write(tmp_path / "official", *small)
    before = sorted(p.name for p in weights.parent.iterdir())
    with pytest.raises(CheckpointError, match="not an empty folder"):
        import_official(weights, config, weights.parent)
    with pytest.raises(CheckpointError, match="not an empty folder"):
        import_official(weights, config, weights)
    assert sorted(p.name for p in weights.parent.iterdir()) == before


@pytest.mark.parametrize("existed", [False, True])
def test_an_import_that_fails_leaves_no_folder_that_is_in_use(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existed: bool
) -> None:
    """It appears whole or not at all, so that the same command can be repeated."""
    weights, config = write(tmp_path / "official", *small)
    out = tmp_path / "imported"
    if existed:
        out.mkdir()

    def disk_full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_tensors", disk_full)
        with pytest.raises(FileError, match="disk is full"):
            import_official(weights, config, out)
    assert not out.exists() or not any(out.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "official"][1 - existed :]
    import_official(weights, config, out)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["imported", "official"]
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
