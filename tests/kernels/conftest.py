"""What the tests of kernels share: compiling them for a GPU that is not there."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest


def leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """What a nested tuple holds, with the way there."""
    if isinstance(value, tuple):
        for i, item in enumerate(value):
            yield from leaves(item, (*path, i))
    else:
        yield path, value


def types_of(value: Any) -> Any:
    """An argument with the compiler's word for None."""
    if isinstance(value, tuple):
        types = map(types_of, value)
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    return "constexpr" if value is None else value


@pytest.fixture
def compile_for_hopper() -> Callable[..., Any]:
    """Compiles a kernel, given types by name ("*bf16", "i32"; None; tuples of these), and constants by name.

    Tensors begin on multiples of 16 bytes, and numbers within tuples are multiples of 16.
    """
    triton = pytest.importorskip("triton")

    def compiled(kernel: Any, arguments: dict[str, Any], constants: dict[str, Any]) -> Any:
        options = {name: constants[name] for name in ("num_warps", "num_stages")}
        fixed: dict[Any, Any] = {name: constants[name] for name in constants if name in kernel.arg_names}
        signature = {name: "constexpr" if name in fixed else types_of(arguments[name]) for name in kernel.arg_names}
        attributes = {}
        for name, argument in arguments.items():
            for path, leaf in leaves(argument, (kernel.arg_names.index(name),)):
                if leaf is None:
                    fixed[path] = None
                elif leaf.startswith("*") or len(path) > 1:
                    attributes[path] = [["tt.divisibility", 16]]
        source = triton.compiler.ASTSource(kernel, signature, fixed, attributes)
        return triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options=options)

    return compiled
