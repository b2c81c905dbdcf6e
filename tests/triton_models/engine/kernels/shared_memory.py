"""Prints how much shared memory the attention kernels take, in bytes. Run without the interpreter.

They are compiled for a GPU of compute capability 8.6, or 9.0 if they are for Hopper, and not launched.
"""

import json
from typing import Any

import torch
from triton import compile as compiled
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

from triton_models.engine.kernels import attention_decode, attention_hopper, attention_prefill
from triton_models.engine.kernels.attention_decode import DecodeWorkspace, NewTokens, plan_decode
from triton_models.engine.models import Rotary

DESKTOP, HOPPER = GPUTarget("cuda", 86, 32), GPUTarget("cuda", 90, 32)
BLOCK_SIZE = 16
KV_HEADS, GROUP = 2, 2


def note(module: Any, name: str, taken: dict[str, int]) -> None:
    """Have launches of a kernel compiled, and the largest noted."""
    kernel = getattr(module, name)
    target, source_of = (HOPPER, GluonASTSource) if kernel.is_gluon() else (DESKTOP, ASTSource)
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)

    def run(*arguments: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        options |= {"debug": False, "instrumentation_mode": knobs.compilation.instrumentation_mode}
        bound, specialization, chosen = bind(*arguments, **options)
        chosen, signature, constants, attributes = kernel._pack_args(
            backend, options, bound, specialization, chosen
        )
        source = source_of(kernel, signature, constants, attributes)
        shared = compiled(source, target=target, options=chosen.__dict__).metadata.shared
        taken[name] = max(shared, taken.get(name, 0))

    kernel.run = run


def launch(head_dim: int, dtype: torch.dtype) -> None:
    """Launch attention of prompts and of decodes, as on a GPU whose blocks are not copied whole."""
    heads = KV_HEADS * GROUP
    projected = torch.zeros(2, heads + 2 * KV_HEADS, head_dim, dtype=dtype)
    cache = torch.zeros(4, BLOCK_SIZE, KV_HEADS, head_dim, dtype=dtype)
    numbers, tables = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int32)
    out = torch.zeros(2, heads, head_dim, dtype=dtype)
    tiles = torch.zeros(1, 7, dtype=torch.int32)
    divided = attention_prefill.prefill_workspace(
        heads, KV_HEADS, head_dim, dtype, sm_count=80, device=torch.device("cpu")
    )
    attention_prefill.prefill_attention(
        projected[:, :heads], cache, cache, tables, tiles, out, workspace=divided
    )
    plan = plan_decode(KV_HEADS, head_dim, dtype, sm_count=80)
    workspace = DecodeWorkspace(
        rows=2, query_heads=heads, kv_heads=KV_HEADS, head_dim=head_dim, device=torch.device("cpu")
    )
    items = attention_decode.share_out(numbers, numbers, plan)
    angles = torch.zeros(64, head_dim // 4)
    attention_decode.decode_attention(
        NewTokens(projected, Rotary(angles, angles)),
        *(cache, cache, tables, items, out),
        plan=plan,
        workspace=workspace,
    )


def launch_on_hopper(dtype: torch.dtype, group: int, head_dim: int) -> None:
    """Launch attention of prompts by specialised warps."""
    heads = KV_HEADS * group
    projected = torch.zeros(2, heads + 2 * KV_HEADS, head_dim, dtype=dtype)
    cache = torch.zeros(4, 64, KV_HEADS, head_dim, dtype=dtype)
    tables, tiles = torch.zeros(2, 4, dtype=torch.int32), torch.zeros(3, 7, dtype=torch.int32)
    out = torch.zeros(2, heads, head_dim, dtype=dtype)
    workspace = attention_prefill.PrefillWorkspace(
        places=264,
        query_heads=heads,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        rows=attention_hopper.TILE_ROWS,
        device=torch.device("cpu"),
    )
    for slopes in (None, torch.zeros(heads)):
        attention_hopper.attend(
            projected[:, :heads], cache, cache, tables, tiles, out,
            workspace=workspace, programs=132, slopes=slopes,
        )  # fmt: skip


def main() -> None:
    """Compile what heads of several widths need."""
    taken: dict[str, int] = {}
    note(attention_decode, "_decode", taken)
    note(attention_decode, "_share_out", taken)
    note(attention_prefill, "_prefill", taken)
    for head_dim, dtype in ((128, torch.bfloat16), (256, torch.bfloat16), (256, torch.float32)):
        launch(head_dim, dtype)
    note(attention_hopper, "_attend", taken)
    for dtype, group, head_dim in ((torch.bfloat16, 16, 128), (torch.float16, 7, 64)):
        launch_on_hopper(dtype, group, head_dim)
    print(json.dumps(taken))  # noqa: T201


if __name__ == "__main__":
    main()
