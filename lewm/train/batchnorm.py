"""BatchNorm's statistics, measured for the weights as they are.

A step normalises by its own batch and keeps running averages for later, of batches that older weights have embedded.
What the projectors see moves with every step, and by more than it varies from frame to frame: with a learning rate
that is not yet small, the averages describe a network that no longer is, and a checkpoint that uses them is much worse
than the model in training. So they are measured anew before anything is validated or saved.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lewm.model.world_model import LeWM, Projector
from lewm.types import Batch


@torch.no_grad()
def measure_batchnorm(model: LeWM, batches: Iterable[Batch]) -> None:
    """Set the statistics of both projectors to those of ``batches``, in place. The model is left in evaluation mode.

    Dropout is as in training: the weights behind the second BatchNorm have been fitted to what it passes on.
    """
    model.eval()
    # Frames of one batch at a time: what is kept of them is small.
    embedded = []
    for batch in batches:
        assert batch.pixels is not None
        embedded.append((model.encoder(batch.pixels.flatten(0, 1)), batch.actions))
    _set_statistics(model.projector, [frames_NW for frames_NW, _ in embedded])
    model.predictor.train()
    predictions = []
    for frames_NW, actions in embedded:
        z_BTD = model.projector(frames_NW).unflatten(0, actions.shape[:2])
        actions_BTA = model.normalise_actions(actions)
        x_BTD = model.predictor(z_BTD[:, :-1], model.action_embedder(actions_BTA[:, :-1]))
        predictions.append(x_BTD.flatten(0, 1))
    model.predictor.eval()
    _set_statistics(model.prediction_projector, predictions)


def _set_statistics(projector: Projector, inputs: Sequence[torch.Tensor]) -> None:
    """Mean and variance of what the projector's BatchNorm sees for inputs (N, W)."""
    first, norm = projector[0], projector[1]
    assert isinstance(norm, nn.BatchNorm1d)
    assert norm.running_mean is not None
    assert norm.running_var is not None
    variance, mean = torch.var_mean(torch.cat([first(x).float() for x in inputs]), dim=0)
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)
