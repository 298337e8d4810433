"""Numbers that tell a healthy representation from a collapsed one."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# A Gaussian N(0, I) has standard deviation 1 and an effective rank near D; a collapsed cloud is a point or a line. A
# rank far below D is no collapse: trained with lambda 0.005, good models of worlds with two degrees of freedom have
# 4 of 192 after the warm-up and 10 to 13 in the end.
COLLAPSED_STD = 0.1
COLLAPSED_RANK = 1.9


def embedding_std(z_BTD: torch.Tensor) -> torch.Tensor:
    """Standard deviation over the batch, averaged over dimensions."""
    return z_BTD.flatten(0, 1).float().std(0).mean()


def effective_rank(z_BTD: torch.Tensor) -> torch.Tensor:
    """exp of the entropy of the covariance's normalised eigenvalues: how many directions are in use; of a point, 1."""
    z = z_BTD.flatten(0, 1).float()
    eigenvalues = torch.linalg.eigvalsh(torch.cov(z.T)).clamp_min(1e-12)
    share = eigenvalues / eigenvalues.sum()
    # What rounding leaves of a point is as large in all directions, but they are not in use.
    is_point = eigenvalues.max() <= 1e-11
    return torch.where(is_point, 1.0, (-(share * share.log()).sum()).exp())


def straightness(z_BTD: torch.Tensor) -> torch.Tensor:
    """Mean cosine similarity of consecutive latent velocities (paper, Eq. "path-straightening"), of T >= 3 frames."""
    velocity = z_BTD.float().diff(dim=1)
    return F.cosine_similarity(velocity[:, 1:], velocity[:, :-1], dim=-1).mean()


def diagnose(z_BTD: torch.Tensor) -> dict[str, float]:
    """All diagnostics of a batch of embedded windows; windows of two frames have one velocity, and no straightness."""
    z_BTD = z_BTD.detach()
    measured = {"embedding_std": embedding_std(z_BTD).item(), "effective_rank": effective_rank(z_BTD).item()}
    return measured | ({"straightness": straightness(z_BTD).item()} if z_BTD.shape[1] > 2 else {})


def collapse_warning(diagnostics: dict[str, float], embed_dim: int, remedy: str) -> str | None:
    """A sentence when the representation has collapsed, with the method's ``remedy``; else None."""
    std, rank = diagnostics["embedding_std"], diagnostics["effective_rank"]
    if std >= COLLAPSED_STD and rank >= COLLAPSED_RANK:
        return None
    return (
        f"The representation has collapsed: embedding standard deviation {std:.3f} (healthy: near 1), effective "
        f"rank {rank:.1f} of {embed_dim}. {remedy}"
    )
