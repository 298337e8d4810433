"""The arithmetic of imagining: what it costs to roll out one candidate plan."""

from __future__ import annotations

from lewm.config import JEPAConfig


def rollout_flops(config: JEPAConfig, context: int, horizon: int) -> int:
    """Floating-point operations of matrix products in ``JEPA.rollout``, for one candidate of ``horizon`` blocks.

    context: real frames it starts from. Counted as the method is written down: for every step, a window of embeddings
    through the whole predictor. ``FastRollout`` does less for the same numbers, and is not granted more search for it.
    """
    width = config.embed_dim
    embedder = product(config.block_dim, config.action_bottleneck)
    embedder += product(config.action_bottleneck, 4 * width) + product(4 * width, width)
    windows = (min(end, config.history) for end in range(context, context + horizon))
    return (context - 1 + horizon) * embedder + sum(_window_flops(config, tokens) for tokens in windows)


def _window_flops(config: JEPAConfig, tokens: int) -> int:
    """Predictor and projector on one window."""
    width, predictor = config.embed_dim, config.predictor
    inner = predictor.heads * predictor.head_width
    attention = product(width, 3 * inner) + 2 * product(tokens, inner) + product(inner, width)
    layer = product(width, 6 * width) + attention + 2 * product(width, predictor.mlp_width)
    return tokens * (predictor.depth * layer + 2 * product(width, config.projector_width))


def product(inputs: int, outputs: int) -> int:
    """A vector times a matrix: a multiplication and an addition for each of its entries."""
    return 2 * inputs * outputs
