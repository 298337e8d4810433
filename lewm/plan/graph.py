"""CUDA graphs: a solver's step recorded once per shape, then replayed without the host's help.

One step of a search is hundreds of small kernels, and launching them one by one takes longer than running them. A
recorded step is replayed as a whole on fixed buffers: inputs are copied in, the search is copied out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from lewm.plan.solver import Problem, Search, Solver

# Before recording, a step runs a few times as usual: libraries allocate and compile on first use.
WARM_UP_STEPS = 3


class GraphedStep:
    """One solver's step on one problem, whose tensors it owns; ``load`` gives them new values.

    Args:
        solver: the solver.
        inputs: tensors that the problem is made of: (z_BTD, past_BTA, goal_BD, keys_B, start_BHA).
        make_problem: the problem made of such tensors.
    """

    def __init__(self, solver: Solver, inputs: tuple[torch.Tensor, ...], make_problem: Callable[..., Problem]) -> None:
        self._inputs = tuple(tensor.clone() for tensor in inputs)
        self.problem = make_problem(*self._inputs)
        self._search = solver.begin(self.problem)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                solver.step(self.problem, self._search)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            after = solver.step(self.problem, self._search)
            _copy(self._search, after)

    def load(self, inputs: tuple[torch.Tensor, ...]) -> None:
        """Pose another problem of the same shape."""
        for mine, new in zip(self._inputs, inputs, strict=True):
            mine.copy_(new)

    def __call__(self, search: Search) -> Search:
        """The search one step later. The result is overwritten by the next call."""
        if search is not self._search:
            _copy(self._search, search)
        self._graph.replay()
        return self._search


def _copy(target: Search, source: Search) -> None:
    for mine, new in zip(target.tensors(), source.tensors(), strict=True):
        mine.copy_(new)
