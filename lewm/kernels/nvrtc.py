"""CUDA C++ compiled when it is first needed, by the compiler that comes with PyTorch (NVRTC)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

_DYNAMIC_SHARED_MEMORY = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class _LaunchConfig(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = (
        *[(name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")],
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class CudaKernel:
    """One kernel of a source file, compiled for the current device.

    Args:
        source: the file; it includes no headers.
        name: of the kernel, declared ``extern "C"``.
        threads: of a block.
        shared_memory: of a block, in bytes.

    Raises RuntimeError (with the compiler's log) or OSError (without a compiler) where it cannot be had.
    """

    def __init__(self, source: Path, name: str, threads: int, shared_memory: int) -> None:
        self._threads, self._shared_memory = threads, shared_memory
        torch.cuda.current_stream()  # makes sure that there is a context to load it into
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        image, driver = _compile(source), _driver()
        _check(driver.cuModuleLoadData(ctypes.byref(self._module), image), "loading")
        _check(driver.cuModuleGetFunction(ctypes.byref(self._function), self._module, name.encode()), "finding")
        _check(driver.cuFuncSetAttribute(self._function, _DYNAMIC_SHARED_MEMORY, shared_memory), "preparing")

    def launch(self, blocks: int, arguments: ctypes.Structure) -> None:
        """Run it on the current stream; the kernel takes ``arguments`` by value."""
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        grid, block = (blocks, 1, 1), (self._threads, 1, 1)
        result = _driver().cuLaunchKernel(self._function, *grid, *block, self._shared_memory, stream, pointers, None)
        _check(result, "launching")

    def clusters_at_once(self, blocks: int) -> int:
        """How many clusters of so many blocks the device runs at a time; the kernel says that it is made of them."""
        config = _LaunchConfig(blocks, 1, 1, self._threads, 1, 1, self._shared_memory)
        count = ctypes.c_int()
        result = _driver().cuOccupancyMaxActiveClusters(ctypes.byref(count), self._function, ctypes.byref(config))
        _check(result, "measuring")
        return count.value


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _compiler() -> ctypes.CDLL:
    major = str(torch.version.cuda).partition(".")[0]
    return ctypes.CDLL(f"libnvrtc.so.{major}")


def _compile(source: Path) -> bytes:
    """The source as machine code for the current device."""
    major, minor = torch.cuda.get_device_capability()
    nvrtc, program = _compiler(), ctypes.c_void_p()
    options = [f"--gpu-architecture=sm_{major}{minor}".encode(), b"--std=c++17"]
    text, name = source.read_bytes(), source.name.encode()
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, 0, None, None):
        raise RuntimeError(f"NVRTC refused {source.name}.")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    log = _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    image = b"" if failed else _fetch(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        raise RuntimeError(f"{source.name} does not compile:\n{log.decode(errors='replace')}")
    return image


def _fetch(get_size: Callable[..., Any], get: Callable[..., Any], program: ctypes.c_void_p) -> bytes:
    """What NVRTC has to say about a program, in a buffer of the size it asks for."""
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def _check(result: int, doing: str) -> None:
    if result:
        message = ctypes.c_char_p()
        _driver().cuGetErrorString(result, ctypes.byref(message))
        raise RuntimeError(f"CUDA failed at {doing} a kernel: {(message.value or b'unknown error').decode()}.")
