"""Only a Hopper GPU runs this kernel, for which there is no interpreter; `test_shared_memory` compiles it."""

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.kernels.paged import PagedCase, Shape, assert_close
from triton_models.engine.kernels.attention_hopper import KEYS, TILE_ROWS, attend, fits
from triton_models.engine.kernels.attention_prefill import PrefillWorkspace, make_tiles, queries_per_tile
from triton_models.engine.models import ChunkRows, Tile

on_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="needs a GPU of compute capability 9.0",
)


def workspace_for(shape: Shape, places: int, device: torch.device) -> PrefillWorkspace:
    """Return a workspace full of NaN."""
    workspace = PrefillWorkspace(
        places=places,
        query_heads=shape.query_heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        rows=TILE_ROWS,
        device=device,
    )
    for left in (workspace.sums, workspace.scales):
        left.fill_(torch.nan)
    return workspace


def divided(tiles: list[Tile], parts: int) -> list[Tile]:
    """Divide every tile whose parts then have two loads or more."""
    made, place = [], 0
    for tile in tiles:
        count = parts if -(-(tile.position + tile.tokens) // KEYS) >= 2 * parts else 1
        made += [tile._replace(part=part, parts=count, place=place) for part in range(count)]
        place += count
    return made


def check(
    case: PagedCase,
    offsets: list[int],
    *,
    programs: int,
    parts: int = 1,
    padding: int = 0,
    slopes: Tensor | None = None,
) -> None:
    """Attend to every sequence from its offset on, in one launch behind two rows of others; compare.

    `parts`: of tiles with enough keys.
    Then again, in a graph: what is left in the workspace by the launch before disturbs no other.
    """
    shape = case.shape
    counts = [length - offset for length, offset in zip(case.lengths, offsets, strict=True)]
    queries = [case.random(count, shape.query_heads) for count in counts]
    chunks, start = [], 2
    for row, count, offset in zip(case.table_rows, counts, offsets, strict=True):
        chunks.append(ChunkRows(row, start, start + count, offset))
        start += count
    tile = queries_per_tile(shape.query_heads, shape.kv_heads, TILE_ROWS)
    made = divided(make_tiles(chunks, tile), parts)
    assert max(each.parts for each in made) == parts
    tiles = torch.tensor(made + [Tile(0, 0, 0, 0)] * padding, dtype=torch.int32, device=case.device)
    rows = torch.cat([case.random(2, shape.query_heads), *queries, case.random(5, shape.query_heads)])
    # As the engine has them: the first heads of a wider product.
    projected = torch.cat([rows, case.random(len(rows), 2 * shape.kv_heads)], 1)
    out = torch.full_like(rows, torch.nan)
    workspace = workspace_for(shape, len(made), case.device)

    def launch() -> None:
        attend(
            projected[:, : shape.query_heads], case.keys, case.values, case.tables, tiles, out,
            workspace=workspace, programs=programs, slopes=slopes,
        )  # fmt: skip

    launch()
    expected = out.clone()
    assert out[:2].isnan().all()
    assert out[start:].isnan().all()
    for number, chunk in enumerate(chunks):
        direct = case.attend(number, queries[number], offsets[number], slopes)
        assert_close(out[chunk.start : chunk.end], direct)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for _ in range(5):
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out[2:start], expected[2:start])
    assert not workspace.arrivals.any()


@on_hopper
@pytest.mark.parametrize(
    ("dtype", "group", "head_dim"),
    [
        (torch.bfloat16, 16, 128),
        (torch.float16, 16, 128),
        (torch.float16, 4, 64),
        (torch.bfloat16, 7, 128),
        (torch.bfloat16, 1, 64),
        (torch.bfloat16, 71, 64),
    ],
)
@pytest.mark.parametrize("programs", [1, 5, 132])
@pytest.mark.parametrize("slopes", [False, True])
def test_equals_direct_attention(
    device: torch.device, dtype: torch.dtype, group: int, head_dim: int, programs: int, *, slopes: bool
) -> None:
    """Of chunks of any length behind any number of tokens, with more tiles than programs and with fewer."""
    offsets, counts = [0, 0, 64, 127, 129, 500, 1000], [1, 300, 65, 2, 127, 12, 200]
    lengths = [offset + count for offset, count in zip(offsets, counts, strict=True)]
    case = PagedCase(
        lengths, Shape(group=group, head_dim=head_dim, block_size=64), dtype=dtype, device=device
    )
    check(case, offsets, programs=programs, padding=9, slopes=case.slopes() if slopes else None)


@on_hopper
@pytest.mark.parametrize(
    ("dtype", "group", "head_dim"),
    [(torch.bfloat16, 16, 128), (torch.float16, 4, 64), (torch.bfloat16, 71, 64)],
)
@pytest.mark.parametrize("programs", [5, 132])
@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("slopes", [False, True])
def test_equals_direct_attention_however_keys_are_divided(
    device: torch.device,
    dtype: torch.dtype,
    group: int,
    head_dim: int,
    programs: int,
    parts: int,
    *,
    slopes: bool,
) -> None:
    """With chunks beside that are not: of short sequences, and of one that ends where a load does."""
    offsets, counts = [0, 5000, 4095, 2047, 9000, 30], [40, 30, 1, 1, 17, 3]
    lengths = [offset + count for offset, count in zip(offsets, counts, strict=True)]
    case = PagedCase(
        lengths, Shape(group=group, head_dim=head_dim, block_size=64), dtype=dtype, device=device
    )
    leaning = case.slopes() if slopes else None
    check(case, offsets, programs=programs, parts=parts, padding=300, slopes=leaning)


@on_hopper
def test_blocks_may_hold_several_copies(device: torch.device) -> None:
    shape = Shape(group=16, head_dim=128, block_size=192)
    case = PagedCase([700, 65, 193], shape, dtype=torch.bfloat16, device=device)
    check(case, [260, 0, 191], programs=132)


@on_hopper
def test_the_same_bits_again_and_whatever_is_beside_a_row(device: torch.device) -> None:
    shape = Shape(group=16, head_dim=128, block_size=64)
    case = PagedCase([3000, 200], shape, dtype=torch.bfloat16, device=device)
    queries = case.random(600, shape.query_heads)
    workspace = workspace_for(shape, 1, device)

    def attended(chunks: list[ChunkRows], programs: int) -> torch.Tensor:
        tiles = torch.tensor(make_tiles(chunks, 8), dtype=torch.int32, device=device)
        out = torch.zeros_like(queries)
        attend(
            queries, case.keys, case.values, case.tables, tiles, out, workspace=workspace, programs=programs
        )
        return out[:400]

    long, short = (case.table_rows[number] for number in range(2))
    expected = attended([ChunkRows(long, 0, 400, 2600)], 132)
    for programs in (3, 132) * 5:
        both = [ChunkRows(long, 0, 400, 2600), ChunkRows(short, 400, 600, 0)]
        assert torch.equal(attended(both, programs), expected)


@pytest.mark.parametrize(
    ("dtype", "group", "head_dim", "block_size", "expected"),
    [
        (torch.bfloat16, 16, 128, 64, True),
        (torch.float16, 1, 64, 128, True),
        (torch.float32, 16, 128, 64, False),
        (torch.bfloat16, 129, 128, 64, False),
        (torch.bfloat16, 16, 80, 64, False),
        (torch.bfloat16, 16, 256, 64, False),
        (torch.bfloat16, 16, 128, 16, False),
    ],
)
def test_what_it_takes(
    dtype: torch.dtype, group: int, head_dim: int, block_size: int, *, expected: bool
) -> None:
    assert fits(dtype, group, head_dim, block_size) is expected
