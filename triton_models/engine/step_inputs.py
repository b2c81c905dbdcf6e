"""The inputs of a step with prompts: the decodes' newest tokens, then the prompts' chunks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.batch import Batch
from triton_models.engine.layout import ChunkRows
from triton_models.engine.slots import SlotTable, slot_of
from triton_models.engine.staging import Staging

Tiles = Sequence[tuple[int, int, int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """Tensors on the device, of T rows: D decodes, the chunks' tokens, and padding."""

    tokens: Tensor
    """[T] int64."""
    slots: Tensor
    """[T] int32."""
    positions: Tensor
    """[T] int64; -1 in padding."""
    decode_lengths: Tensor
    """[D] int32, including the new token."""
    tiles: Tensor
    """[N, 4] int32."""
    rows: Tensor
    """[S] int64, the rows that sample."""


def chunk_rows(batch: Batch) -> tuple[ChunkRows, ...]:
    """Return which rows of a step hold the chunks of its prompts."""
    chunks = []
    row = len(batch.decodes)
    for chunk in batch.prefills:
        chunks.append(ChunkRows(slot_of(chunk.sequence), row, row + chunk.count, chunk.start))
        row += chunk.count
    return tuple(chunks)


def stage_prompts(staging: Staging, batch: Batch, tiles: Tiles, *, padding: int, spare: int) -> None:
    """Stage the prompts' tokens, then `padding` rows of the slot `spare`; also sampling rows and tiles."""
    slots: list[int] = []
    tokens: list[int] = []
    positions: list[int] = []
    rows = list(range(len(batch.decodes)))
    for chunk in batch.prefills:
        sequence = chunk.sequence
        slots += [slot_of(sequence)] * chunk.count
        tokens += sequence.tokens[chunk.start : chunk.end]
        positions += range(chunk.start, chunk.end)
        if chunk.samples:
            rows.append(len(batch.decodes) + len(tokens) - 1)
    staging.integers("prompt_slots", slots + [spare] * padding)
    staging.integers("prompt_tokens", tokens + [0] * padding)
    staging.integers("prompt_positions", positions + [-1] * padding)
    staging.integers("rows", rows)
    staging.integers("tiles", [number for tile in tiles for number in tile])


def step_inputs(views: dict[str, Tensor], table: SlotTable) -> StepInputs:
    """Combine an uploaded step with what the slots on the device hold about its decodes."""
    decodes = views["decode_slots"]
    lengths = table.lengths[decodes]
    return StepInputs(
        tokens=torch.cat([table.tokens[decodes], views["prompt_tokens"]]),
        slots=torch.cat([decodes, views["prompt_slots"]]).int(),
        positions=torch.cat([lengths, views["prompt_positions"]]),
        decode_lengths=(lengths + 1).int(),
        tiles=views["tiles"].view(-1, 4).int(),
        rows=views["rows"],
    )
