"""SIGReg: sketched isotropic Gaussian regularisation (paper, appendix "SIGReg").

Embeddings should be distributed as N(0, I). A high-dimensional distribution is that Gaussian exactly when each
of its one-dimensional projections is N(0, 1) (Cramér-Wold), so SIGReg projects a batch onto random unit
directions u and measures, for each, how far the empirical characteristic function of the projections h = Z u,

    phi_N(t) = 1/N sum_n exp(i t h_n),

is from that of the standard Gaussian, phi_0(t) = exp(-t^2/2), with the Epps-Pulley statistic

    T = N integral w(t) |phi_N(t) - phi_0(t)|^2 dt,      w(t) = exp(-t^2/2).

The integrand is even in t, so the integral runs over [t_min, t_max] by the trapezoid rule and counts double.

Shapes: N time steps, B batch, D embedding, M directions, Q knots. The statistic is taken over the batch, for
each time step and direction on its own, and averaged.
"""

from __future__ import annotations

import torch
from torch import nn

from lewm.config import SigregConfig
from lewm.rng import derive_seed


def sigreg(
    z_NBD: torch.Tensor, directions_DM: torch.Tensor, knots: int = 17, t_min: float = 0.0, t_max: float = 3.0
) -> torch.Tensor:
    """The SIGReg statistic of embeddings (N, B, D) along unit directions (D, M): a scalar.

    Computed in float32 whatever the input: the characteristic function's error is a difference of numbers
    close to one another.
    """
    with torch.autocast(z_NBD.device.type, enabled=False):
        t_Q, weight_Q = _quadrature(knots, t_min, t_max, z_NBD.device)
        h_NBM = z_NBD.float() @ directions_DM.float()
        angle_NBMQ = h_NBM.unsqueeze(-1) * t_Q
        real_NMQ, imag_NMQ = angle_NBMQ.cos().mean(1), angle_NBMQ.sin().mean(1)
        error_NMQ = (real_NMQ - (-0.5 * t_Q**2).exp()).square() + imag_NMQ.square()
        batch = z_NBD.shape[1]
        return batch * (error_NMQ @ weight_Q).mean()


def _quadrature(knots: int, t_min: float, t_max: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Knots and trapezoid weights, (Q,) each; the weights include the window w(t) and both signs of t."""
    t = torch.linspace(t_min, t_max, knots, device=device)
    step = (t_max - t_min) / (knots - 1)
    weight = torch.full_like(t, 2 * step)
    weight[0] = weight[-1] = step
    return t, weight * (-0.5 * t**2).exp()


class SIGReg(nn.Module):
    """``sigreg`` with fresh directions at each call, drawn from a generator of its own.

    The draw for step s is a pure function of (seed, s): nothing else that consumes random numbers can change
    it, an interrupted run continues with the directions it would have had, and several processes agree.
    """

    def __init__(self, config: SigregConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.seed = seed

    def directions(self, dim: int, step: int, device: torch.device) -> torch.Tensor:
        """Unit directions for one step, (D, M)."""
        generator = torch.Generator(device).manual_seed(derive_seed(self.seed, step))
        directions_DM = torch.randn(dim, self.config.directions, generator=generator, device=device)
        return directions_DM / directions_DM.norm(dim=0)

    def forward(self, z_NBD: torch.Tensor, step: int) -> torch.Tensor:
        c = self.config
        directions_DM = self.directions(z_NBD.shape[-1], step, z_NBD.device)
        return sigreg(z_NBD, directions_DM, c.knots, c.t_min, c.t_max)
