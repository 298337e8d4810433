"""CUDA graphs: work captured once per shape, then replayed without the host's help.

A search is thousands of small kernels, and launching them one by one takes longer than running them. Captured work is
replayed as a whole on fixed buffers: inputs are copied in, and the outputs are always in the same place.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

Tensors = tuple[torch.Tensor, ...]


class Captured:
    """A function of tensors, captured for the shapes of ``inputs``, of which it keeps copies on the device.

    The function neither waits for the device nor draws from a generator. It runs once as usual before it is captured:
    libraries allocate and compile on first use.
    """

    def __init__(self, function: Callable[..., Tensors], inputs: Tensors, device: torch.device) -> None:
        self._function = function  # kept: the graph reads tensors that it may hold
        self._inputs = tuple(tensor.to(device, copy=True) for tensor in inputs)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            function(*self._inputs)
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        gc.collect()  # an older graph that is freed while this one is captured would spoil it
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # other threads may use the device
            self._outputs = function(*self._inputs)

    def __call__(self, *inputs: torch.Tensor) -> Tensors:
        """The function's outputs, which the next call overwrites; ``inputs`` may be on another device."""
        for mine, new in zip(self._inputs, inputs, strict=True):
            mine.copy_(new)
        self._graph.replay()
        return self._outputs


class Captures:
    """Graphs of several functions, captured when a combination of function and shapes is first met."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._device, self._enabled = device, enabled and device.type == "cuda"
        self._captured: dict[tuple[object, ...], Captured] = {}

    def __call__(self, name: str, function: Callable[..., Tensors], *inputs: torch.Tensor) -> Tensors:
        """``function(*inputs)``, captured under ``name``, which must always mean the same function."""
        if not self._enabled:
            return function(*inputs)
        key = name, *(tensor.shape for tensor in inputs)
        if key not in self._captured:
            self._captured[key] = Captured(function, inputs, self._device)
        return self._captured[key](*inputs)
