"""SIGReg: sketched isotropic Gaussian regularisation (paper, appendix "SIGReg").

Embeddings should be distributed as N(0, I). A high-dimensional distribution is that Gaussian exactly when each
of its one-dimensional projections is N(0, 1) (Cramér-Wold), so SIGReg projects a batch onto random unit
directions u and measures, for each, how far the empirical characteristic function of the projections h = Z u,

    phi_N(t) = 1/N sum_n exp(i t h_n),

is from that of the standard Gaussian, phi_0(t) = exp(-t^2/2), with the Epps-Pulley statistic

    T = N integral w(t) |phi_N(t) - phi_0(t)|^2 dt,      w(t) = exp(-t^2/2).

The integrand is even in t, so the integral runs over [0, 3] by the trapezoid rule and counts double.

Shapes: N time steps, B batch, D embedding, M directions, Q knots. The statistic is taken over the batch, for
each time step and direction on its own, and averaged.

The statistic squares a mean over the batch, so the mean of several processes' statistics is not the statistic of their
batches together. Processes that share a batch average phi_N itself, differentiably, and then go on alike: ``average``.
"""

from __future__ import annotations

import torch
from torch import nn

from lewm.rng import derive_seed
from lewm.types import Peers

END = 3.0  # of the quadrature. The paper's appendix has [0.2, 4].


def sigreg(z_NBD: torch.Tensor, directions_DM: torch.Tensor, knots: int = 17) -> torch.Tensor:
    """The SIGReg statistic of embeddings (N, B, D) along unit directions (D, M): a scalar.

    Computed in float32 whatever the input: the characteristic function's error is a difference of numbers
    close to one another.
    """
    t_Q, weight_Q = _quadrature(knots, z_NBD.device)
    return _statistic(characteristic_function(z_NBD, directions_DM, t_Q), t_Q, weight_Q, z_NBD.shape[1])


def characteristic_function(z_NBD: torch.Tensor, directions_DM: torch.Tensor, t_Q: torch.Tensor) -> torch.Tensor:
    """phi_N of the batch's projections, real and imaginary part: float32 (2, N, M, Q)."""
    with torch.autocast(z_NBD.device.type, enabled=False):
        h_NBM = z_NBD.float() @ directions_DM.float()
        angle_NBMQ = h_NBM.unsqueeze(-1) * t_Q
        return torch.stack([angle_NBMQ.cos().mean(1), angle_NBMQ.sin().mean(1)])


def _statistic(phi_2NMQ: torch.Tensor, t_Q: torch.Tensor, weight_Q: torch.Tensor, batch: int) -> torch.Tensor:
    """Epps-Pulley from the characteristic function of ``batch`` projections, averaged over N and M."""
    with torch.autocast(phi_2NMQ.device.type, enabled=False):
        real_NMQ, imag_NMQ = phi_2NMQ
        error_NMQ = (real_NMQ - (-0.5 * t_Q**2).exp()).square() + imag_NMQ.square()
        return batch * (error_NMQ @ weight_Q).mean()


def _quadrature(knots: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Knots and trapezoid weights, (Q,) each; the weights include the window w(t) and both signs of t."""
    t = torch.linspace(0, END, knots, device=device)
    step = END / (knots - 1)
    weight = torch.full_like(t, 2 * step)
    weight[:1].fill_(step)  # not by assignment, which copies from the host: a step that is being captured cannot
    weight[-1:].fill_(step)
    return t, weight * (-0.5 * t**2).exp()


class SIGReg(nn.Module):
    """``sigreg`` of a batch that one or several processes hold. knots: points of the quadrature."""

    def __init__(self, knots: int = 17) -> None:
        super().__init__()
        self.knots = knots
        # A plain attribute, so that a compiled version can take its place.
        self.characteristic_function = characteristic_function

    def forward(self, z_NBD: torch.Tensor, directions_DM: torch.Tensor, peers: Peers) -> torch.Tensor:
        """The statistic of this process's embeddings (N, B, D) together with all others': a scalar."""
        t_Q, weight_Q = _quadrature(self.knots, z_NBD.device)
        phi_2NMQ = peers.mean(self.characteristic_function(z_NBD, directions_DM, t_Q))
        return _statistic(phi_2NMQ, t_Q, weight_Q, z_NBD.shape[1] * peers.count)


def random_directions(dim: int, count: int, seed: int, step: int, device: torch.device) -> torch.Tensor:
    """Unit directions for one step, (D, M).

    A pure function of (seed, step): nothing else that consumes random numbers can change the draw, an interrupted run
    continues with the directions it would have had, and several processes agree.
    """
    generator = torch.Generator(device).manual_seed(derive_seed(seed, step))
    directions_DM = torch.randn(dim, count, generator=generator, device=device)
    return directions_DM / directions_DM.norm(dim=0)
