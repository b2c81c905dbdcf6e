"""The state of running sequences on the device: one row, a slot, per sequence."""

import torch
from torch import Tensor

from triton_models.engine.block_manager import PADDING_BLOCK
from triton_models.engine.sequence import Sequence
from triton_models.engine.staging import Staging


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

    def load(self, views: dict[str, Tensor]) -> None:
        """Apply what `stage_sequences` and `stage_blocks` put into an uploaded step."""
        slots = views["loaded_slots"]
        if slots.numel():
            self.tables.index_fill_(0, slots, PADDING_BLOCK)
            self.lengths[slots] = views["loaded_lengths"]
            self.drawn[slots] = views["loaded_drawn"]
            self.seeds[slots] = views["loaded_seeds"]
            self.temperatures[slots] = views["loaded_temperatures"].float()
            self.top_k[slots] = views["loaded_top_k"]
            self.top_p[slots] = views["loaded_top_p"]
            self.min_p[slots] = views["loaded_min_p"]
        if views["table_slots"].numel():
            places = views["table_slots"], views["table_columns"]
            self.tables[places] = views["table_blocks"].int()

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
