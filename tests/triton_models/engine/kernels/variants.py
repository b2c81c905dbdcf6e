"""Prints how many variants of each kernel some launches would compile. Run without the interpreter.

Nothing is compiled or launched: the compiler's own rules are asked what they would tell apart, as for a
Hopper GPU.
"""

import json
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from triton_models.engine.kernels import attention_decode, attention_prefill, early, elementwise
from triton_models.engine.kernels.attention_decode import DecodePlan, DecodeWorkspace, NewTokens
from triton_models.engine.kernels.attention_prefill import PrefillConfig
from triton_models.engine.models import Rotary

SHAPE = {"query_heads": 6, "kv_heads": 2, "head_dim": 16}
HEADS = 10


def spy(module: Any, name: str, seen: dict[str, set[str]]) -> None:
    """Have launches of a kernel noted by what the compiler would specialise on."""
    kernel = getattr(module, name)
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(*arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        _, specialization, chosen = bind(*arguments, **options)
        seen.setdefault(name, set()).add(str((specialization, sorted(chosen.items()))))

    kernel.run = run


def integers(count: int, *, misaligned: bool) -> Tensor:
    """Return int32 numbers, where asked for at an address that is no multiple of 16."""
    return torch.zeros(count + 1, dtype=torch.int32)[int(misaligned) :][:count]


def launch(rows: int, width: int, *, misaligned: bool, extra: int | None) -> None:
    """Launch every kernel on a step of so many rows and block tables of such a width."""
    projected = torch.zeros(rows, HEADS, 16, dtype=torch.bfloat16)
    queries = projected[:, :6]
    cache = torch.zeros(4, 16, 2, 16, dtype=torch.bfloat16)
    tables = integers(rows * width, misaligned=misaligned).view(rows, width)
    numbers = integers(rows, misaligned=misaligned)
    out = torch.zeros(rows, 6, 16, dtype=torch.bfloat16)
    workspace = DecodeWorkspace(rows=rows, device=torch.device("cpu"), **SHAPE)
    plan = DecodePlan(tile=16, warps=4, stages=2, extra=extra)
    items = attention_decode.share_out(numbers, numbers, plan)
    angles = torch.zeros(64, 4)
    for each in (queries, NewTokens(projected, Rotary(angles, angles))):
        attention_decode.decode_attention(
            each, cache, cache, tables, items, out, plan=plan, workspace=workspace
        )
    tiles = integers(7 * rows, misaligned=misaligned).view(rows, 7)
    attention_prefill.prefill_attention(queries, cache, cache, tables, tiles, out)
    divided = attention_prefill.prefill_workspace(
        6, 2, 16, torch.bfloat16, sm_count=8, device=torch.device("cpu")
    )
    attention_prefill.prefill_attention(queries, cache, cache, tables, tiles, out, workspace=divided)
    in_blocks = PrefillConfig(rows=64, keys=16, warps=4, stages=2, in_blocks=True)
    attention_prefill.prefill_attention(queries, cache, cache, tables, tiles, out, config=in_blocks)
    elementwise.rotate_store(projected, angles, angles, numbers, tables, numbers, cache, cache, query_heads=6)


def main() -> None:
    """Launch what an engine would, and count."""
    early._KNOWN = True
    seen: dict[str, set[str]] = {}
    spy(attention_decode, "_decode", seen)
    spy(attention_decode, "_share_out", seen)
    spy(attention_prefill, "_prefill", seen)
    spy(elementwise, "_rotate_store", seen)
    for rows in (1, 2, 16, 33, 200):
        for width in (1, 5, 16, 32):
            for misaligned in (False, True):
                for extra in (None, 1, 16):
                    launch(rows, width, misaligned=misaligned, extra=extra)
    print(json.dumps({name: len(variants) for name, variants in seen.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
