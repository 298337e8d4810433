"""Training on a GPU: bf16, frames on the device, and a run that continues."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lewm.config import Config
from lewm.train.logs import read_metrics
from lewm.train.loop import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_a_run_on_the_gpu_learns_and_continues(debug_config: Config, tmp_path: Path) -> None:
    longer = replace(debug_config.train, steps=60, schedule="constant", lr=3e-3, log_every=5, checkpoint_every=20)
    config = replace(debug_config, device="cuda", out=tmp_path / "run", train=longer)
    result = train(config)
    assert result.model.device.type == "cuda"
    losses = [row["loss"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < losses[0]
    again = train(config)
    assert again.steps == 60
