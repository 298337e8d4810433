"""The rollout's Triton kernels compile for a Hopper and fit its shared memory; no GPU is needed to tell."""

import math
from typing import Any

import pytest

from lewm.kernels import rollout_attention, rollout_attention_apart, rollout_mlp
from lewm.kernels.rollout_launch import Launch, New, Spare, Strided
from lewm.kernels.rollout_tiling import choose_tiling
from lewm.kernels.rollout_weights import AttentionWeights, Linear, MLPWeights

LINEAR = Linear("*bf16", "*fp32")
ATTENTION, MLP = AttentionWeights(LINEAR, LINEAR), MLPWeights(LINEAR, LINEAR)
NEW = New(Strided("*fp32", "i32"), Strided("*bf16", "i32"), "*fp32")
EARLIER = Strided("*bf16", "i32")
SPARE = Spare("*fp32", "i32")
LAUNCH = Launch(choose_tiling, overlap=True, fast_gelu=True)
HEADS, WIDE, MOD_WIDTH = 16, 2048, 6 * 6 * 192


def check(compile_for_hopper: Any, kernel: Any, arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    compiled = compile_for_hopper(kernel, arguments, constants)
    assert compiled.metadata.shared <= 227 * 1024
    assert "griddepcontrol.wait" in compiled.asm["ptx"], "kernels overlap"


# New tokens, earlier ones, whether keys and values are kept, and for how many rows.
WINDOWS = [(1, 0, True, 300), (1, 2, False, 300), (1, 1, True, 3000), (2, 1, False, 600), (3, 0, False, 900)]


@pytest.mark.parametrize(("new", "past", "keeps", "rows"), WINDOWS)
def test_attention_in_one_kernel(compile_for_hopper, new: int, past: int, keeps: bool, rows: int):
    tiling = choose_tiling("attention_past" if past else "attention", rows)
    groups = math.gcd(tiling.groups, HEADS)
    kernel = rollout_attention.attend_token if new == 1 else rollout_attention.attend_window
    arguments = {"new": NEW, "weights": ATTENTION, "past": (EARLIER,) * past, "kv": "*bf16" if keeps else None}
    arguments |= {"out": "*fp32", "spare": SPARE} | dict.fromkeys(("samples", "shared", "candidates"), "i32")
    constants = {"NEW": new, "OUTPUTS": new, "MOD_WIDTH": MOD_WIDTH, "HEADS": HEADS // groups, "GROUPS": groups}
    check(compile_for_hopper, kernel, arguments, constants | LAUNCH.options(tiling))


def test_attention_apart(compile_for_hopper):
    sizes = {"NEW": 3, "OUTPUTS": 3, "MOD_WIDTH": MOD_WIDTH, "HEADS": HEADS}
    small = sizes | LAUNCH.options(rollout_attention_apart._SMALL)
    arguments = {"new": NEW, "out": "*bf16", "rows": "i32"}
    check(compile_for_hopper, rollout_attention_apart.normalise_tokens, arguments, small)
    arguments = {"qkv": "*bf16", "q_bias": "*fp32", "past": (), "out": "*bf16"}
    arguments |= dict.fromkeys(("samples", "shared", "candidates"), "i32")
    check(compile_for_hopper, rollout_attention_apart.mix_tokens, arguments, small)
    arguments = {"mixed": EARLIER, "new": NEW, "weights": ATTENTION, "out": "*fp32", "spare": None, "rows": "i32"}
    large = sizes | LAUNCH.options(choose_tiling("output", 9000))
    check(compile_for_hopper, rollout_attention_apart.project_back, arguments, large)


@pytest.mark.parametrize(("rows", "modulated"), [(300, True), (9000, True), (9000, False)])
def test_mlps(compile_for_hopper, rows: int, modulated: bool):
    tiling = choose_tiling("mlp", rows)
    groups = math.gcd(tiling.groups, WIDE // tiling.chunk)
    arguments = {"x": "*fp32", "mod": Strided("*bf16", "i32") if modulated else None, "weights": MLP}
    arguments |= {"out": Strided("*fp32", "i32"), "spare": SPARE if modulated else None, "rows": "i32", "tokens": "i32"}
    constants = {"MOD_WIDTH": MOD_WIDTH, "CHUNKS": WIDE // tiling.chunk // groups, "CHUNK": tiling.chunk}
    constants |= {"GROUPS": groups, "FAST": True} | LAUNCH.options(tiling)
    check(compile_for_hopper, rollout_mlp.transform_tokens, arguments, constants)
