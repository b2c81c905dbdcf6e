"""The state of running sequences on the device, one row (a slot) per sequence; and what a step uploads."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from triton_models.engine.blocks import PADDING_BLOCK
from triton_models.engine.sequence import Sequence


class Staging:
    """Collects named lists of 64-bit numbers on the host, then uploads them as views of one tensor."""

    def __init__(self) -> None:
        self._words = array("q")
        self._parts: list[tuple[str, int, torch.dtype]] = []

    def integers(self, name: str, values: Iterable[int]) -> None:
        """Add a list that becomes an int64 tensor."""
        self._add(name, array("q", values), torch.int64)

    def floats(self, name: str, values: Iterable[float]) -> None:
        """Add a list that becomes a float64 tensor."""
        self._add(name, array("d", values), torch.float64)

    def upload(self, device: torch.device) -> dict[str, Tensor]:
        """Return every list by name, as one-dimensional tensors on `device`."""
        if not self._words:
            return {name: torch.empty(0, dtype=dtype, device=device) for name, _, dtype in self._parts}
        words = upload(torch.frombuffer(self._words, dtype=torch.int64), device)
        parts = torch.split(words, [length for _, length, _ in self._parts])
        return {name: part.view(dtype) for part, (name, _, dtype) in zip(parts, self._parts, strict=True)}

    def _add(self, name: str, values: "array[int] | array[float]", dtype: torch.dtype) -> None:
        self._words.frombytes(values.tobytes())
        self._parts.append((name, len(values), dtype))


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without waiting for its current work."""
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers


@dataclass(slots=True, kw_only=True)
class Staged:
    """A step's numbers on the device: one-dimensional views of one upload, int64 unless said otherwise."""

    decode_slots: Tensor
    """The decodes' slots, then those of padding."""
    sampling_slots: Tensor
    rows: Tensor
    """The rows of a step with prompts that sample."""
    new_blocks: Tensor
    """The blocks to clear; empty where that is not needed."""

    prompt_slots: Tensor
    """Each prompt token's slot, as the next two; then those of padding."""
    prompt_tokens: Tensor
    prompt_positions: Tensor
    tiles: Tensor
    """Four numbers each, see `StepOperations.tiles`."""

    loaded_slots: Tensor
    """The slots whose state is replaced, by the values in the other `loaded_*`."""
    loaded_lengths: Tensor
    loaded_drawn: Tensor
    loaded_seeds: Tensor
    loaded_temperatures: Tensor
    """float64, like `loaded_top_p` and `loaded_min_p`."""
    loaded_top_k: Tensor
    loaded_top_p: Tensor
    loaded_min_p: Tensor

    table_slots: Tensor
    """New entries of block tables: their slots, columns and blocks."""
    table_columns: Tensor
    table_blocks: Tensor

    views: dict[str, Tensor]
    """All of these by name, and what the rules of single requests need (sampling, penalties, scores)."""

    @classmethod
    def of(cls, views: dict[str, Tensor]) -> "Staged":
        """Return the record of an upload."""
        return cls(views=views, **{name: views[name] for name in _NAMES})


_NAMES = [each.name for each in fields(Staged) if each.name != "views"]


class SlotTable:
    """The state of every slot, on the device, so that a decode step needs hardly anything from the host.

    A step names its sequences by their slots and finds here what to compute and how to sample. Only changes
    come from the host: all of a sequence's state with each chunk of its prompt, and a new block now and then.
    There is one slot more than sequences may run: `spare` belongs to no sequence. Rows that only pad a step
    use it, and write into the padding block.
    """

    def __init__(self, slots: int, blocks_per_sequence: int, device: torch.device) -> None:
        self.spare = slots
        rows = slots + 1
        self.tables = torch.full((rows, blocks_per_sequence), PADDING_BLOCK, dtype=torch.int32, device=device)
        """[slots + 1, blocks] int32: KV blocks in order, then the padding block."""
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        """Number of tokens whose keys and values are in the cache, which is the position of the next."""
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """The newest token, which is not in the cache yet."""
        self.drawn = torch.zeros(rows, dtype=torch.int64, device=device)
        """Number of tokens sampled so far."""
        self.seeds = torch.zeros(rows, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(rows, dtype=torch.float32, device=device)
        self.top_k = torch.zeros(rows, dtype=torch.int64, device=device)
        self.top_p = torch.ones(rows, dtype=torch.float64, device=device)
        self.min_p = torch.zeros(rows, dtype=torch.float64, device=device)

    def load(self, staged: Staged) -> None:
        """Apply what `stage_sequences` and `stage_blocks` put into an uploaded step."""
        slots = staged.loaded_slots
        if slots.numel():
            self.tables.index_fill_(0, slots, PADDING_BLOCK)
            self.lengths[slots] = staged.loaded_lengths
            self.drawn[slots] = staged.loaded_drawn
            self.seeds[slots] = staged.loaded_seeds
            self.temperatures[slots] = staged.loaded_temperatures.float()
            self.top_k[slots] = staged.loaded_top_k
            self.top_p[slots] = staged.loaded_top_p
            self.min_p[slots] = staged.loaded_min_p
        if staged.table_slots.numel():
            places = staged.table_slots, staged.table_columns
            self.tables[places] = staged.table_blocks.int()

    def advance(self, decodes: Tensor, sampling: Tensor, tokens: Tensor) -> None:
        """Record a step: one more token in the cache for each decode, a new token for each row that samples.

        Args:
            decodes: [D] int64 slots.
            sampling: [S] int64 slots.
            tokens: [S] int64, what was sampled.
        """
        self.lengths[decodes] += 1
        self.tokens[sampling] = tokens
        self.drawn[sampling] += 1
        # Padding rows always stay at position 0, which is in the padding block.
        self.lengths[self.spare :].zero_()


def slot_of(sequence: Sequence) -> int:
    """Return the slot of a running sequence.

    Raises:
        RuntimeError: it is not running; a bug in the engine.
    """
    if sequence.slot is None:
        raise RuntimeError(f"{sequence.request.request_id} holds no slot")
    return sequence.slot


def stage_sequences(staging: Staging, loaded: list[tuple[Sequence, int]]) -> None:
    """Stage the whole slot state of sequences, each with the number of its cached tokens after the step."""
    sequences = [sequence for sequence, _ in loaded]
    params = [sequence.request.sampling for sequence in sequences]
    staging.integers("loaded_slots", [slot_of(sequence) for sequence in sequences])
    staging.integers("loaded_lengths", [length for _, length in loaded])
    staging.integers("loaded_drawn", [sequence.generated for sequence in sequences])
    staging.integers("loaded_seeds", [sequence.seed for sequence in sequences])
    staging.floats("loaded_temperatures", [each.temperature for each in params])
    staging.integers("loaded_top_k", [each.top_k for each in params])
    staging.floats("loaded_top_p", [each.top_p for each in params])
    staging.floats("loaded_min_p", [each.min_p for each in params])


def stage_blocks(staging: Staging, entries: list[tuple[int, int, int]]) -> None:
    """Stage block-table entries, each (slot, column, block)."""
    staging.integers("table_slots", [slot for slot, _, _ in entries])
    staging.integers("table_columns", [column for _, column, _ in entries])
    staging.integers("table_blocks", [block for _, _, block in entries])
