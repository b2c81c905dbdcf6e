"""The state of running sequences on the device, one row (a slot) per sequence; and what a step uploads."""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from triton_models.engine.blocks import PADDING_BLOCK
from triton_models.engine.sequence import Chunk, Sequence

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_Results = TypeVar("_Results", bound="DataclassInstance")

IN_PROMPT = 1
"""The lowest bit of an entry of `PenaltyTable.seen`."""

GENERATED = 2
"""What each generated token adds to its entry: the bits above the lowest count them."""


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
        """Return every list by name, each a one-dimensional tensor on `device`; not all may be empty."""
        words = upload(torch.frombuffer(self._words, dtype=torch.int64), device)
        parts = torch.split(words, [length for _, length, _ in self._parts])
        return {
            name: part if dtype is words.dtype else part.view(dtype)
            for part, (name, _, dtype) in zip(parts, self._parts, strict=True)
        }

    def _add(self, name: str, values: "array[int] | array[float]", dtype: torch.dtype) -> None:
        self._words.frombytes(values.tobytes())
        self._parts.append((name, len(values), dtype))


def upload(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to `device` without waiting for its current work."""
    if device.type == "cuda":
        return numbers.pin_memory().to(device, non_blocking=True)
    return numbers


def download(results: _Results) -> _Results:
    """Start copying the tensors of `results` to pinned host memory; their reader must wait for the device."""
    copies = {}
    for each in fields(results):
        if isinstance(value := getattr(results, each.name), Tensor):
            copies[each.name] = value.to("cpu", non_blocking=True)
    return replace(results, **copies)


@dataclass(slots=True, kw_only=True)
class Staged:
    """A step's numbers on the device: one-dimensional views of one upload, int64 unless said otherwise.

    A table is staged column by column, or row by row where it says "each".
    """

    decode_slots: Tensor
    """The decodes' slots, then those of padding."""
    rows: Tensor
    """Three columns, every row of a step with prompts: its slot, token and position; the decodes first, whose
    token is -1, since the device knows it and the position; padding at the end."""
    tiles: Tensor
    """Seven numbers each, see `StepOperations.tiles`; those of padding are 0."""
    picked: Tensor
    """The rows of a step with prompts that sample."""
    new_blocks: Tensor
    """The blocks to clear; empty where that is not needed."""
    copies: Tensor
    """Two columns: blocks, and where their values go before any is cleared."""

    loaded_slots: Tensor
    """The slots whose state is replaced, by the next two."""
    loaded_integers: Tensor
    """Four each: length, number of tokens sampled, seed, top_k."""
    loaded_floats: Tensor
    """float64, three each: temperature, top_p, min_p."""
    moved_slots: Tensor
    """The slots of which only the next two are replaced."""
    moved: Tensor
    """Two columns: length and number of tokens sampled."""
    table_entries: Tensor
    """Three columns, new entries of block tables: their slots, columns and blocks."""

    penalty_slots: Tensor
    """The slots whose penalties are replaced, by the next two."""
    penalty_factors: Tensor
    """float64, three each: repetition, presence, frequency."""
    seen: Tensor
    """Three columns, entries of `PenaltyTable.seen`: their slots, tokens and values."""

    sampling_slots: Tensor
    ahead: Tensor
    """How many guesses are between each sampling row and what is known; empty: none anywhere."""
    guesses: Tensor
    """The last of these guesses; -1: none. Empty as `ahead` is."""
    penalised_rows: Tensor
    """Among the rows that sample, as all that follow."""
    guesses_before: Tensor
    """Two columns: places in `penalised_rows`, and each guess before their rows."""
    biased: Tensor
    """Two columns: rows and ids; the values are next."""
    bias_values: Tensor
    """float64."""
    banned: Tensor
    """Two columns: rows and ids."""
    masked_rows: Tensor
    logprob_rows: Tensor

    scoring_rows: Tensor
    """The step's rows that score a token of a prompt, and those tokens."""
    scored_tokens: Tensor


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
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        """The newest token, which is not in the cache yet."""
        self._integers = torch.zeros((4, rows), dtype=torch.int64, device=device)
        self._floats = torch.zeros((3, rows), dtype=torch.float64, device=device)
        self.lengths, self.drawn, self.seeds, self.top_k = self._integers
        """`lengths`: tokens whose keys and values are in the cache, which is the position of the next.
        `drawn`: tokens sampled so far."""
        self.temperatures, self.top_p, self.min_p = self._floats

    def load(self, staged: Staged) -> None:
        """Apply what `stage_slots` put into an uploaded step."""
        slots = staged.loaded_slots
        if slots.numel():
            self.tables.index_fill_(0, slots, PADDING_BLOCK)
            self._integers[:, slots] = staged.loaded_integers.view(-1, 4).T
            self._floats[:, slots] = staged.loaded_floats.view(-1, 3).T
        if staged.moved_slots.numel():
            self._integers[:2, staged.moved_slots] = staged.moved.view(2, -1)
        if staged.table_entries.numel():
            rows, columns, blocks = staged.table_entries.view(3, -1)
            self.tables[rows, columns] = blocks.int()

    def rules(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return copies of the state of `rows`, [S] int64 slots, that tells how to sample.

        Returns:
            [4, S] int64: lengths, drawn, seeds, top_k; and [3, S] float64: temperatures, top_p, min_p.
        """
        return self._integers.index_select(1, rows), self._floats.index_select(1, rows)

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


class PenaltyTable:
    """A row of counts for every slot; only sequences with penalties use theirs.

    The host rebuilds a row from the known tokens in the step that ends a prompt: the first step that samples
    after an admission or a preemption. After that, each step that samples updates the counts on the device,
    since the host may be a token behind. Nothing here waits for the device.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.seen = torch.zeros((slots, vocabulary), dtype=torch.int32, device=device)
        """[slots, vocabulary] int32: `IN_PROMPT`, plus `GENERATED` for each time the token was generated."""
        self.factors = torch.zeros((3, slots), dtype=torch.float32, device=device)
        """[3, slots] float32: repetition, presence, frequency."""
        self.generated = torch.full((1,), GENERATED, dtype=torch.int32, device=device)
        """What a token adds to its count each time."""

    def load(self, staged: Staged) -> None:
        """Apply what `stage_penalties` has put into an uploaded step."""
        slots = staged.penalty_slots
        if slots.numel():
            self.factors[:, slots] = staged.penalty_factors.view(-1, 3).T.float()
            self.seen.index_fill_(0, slots, 0)
            rows, tokens, values = staged.seen.view(3, -1)
            self.seen[rows, tokens] = values.int()


@dataclass(frozen=True, slots=True)
class GuessedRows:
    """Which of a step's S rows follow guesses: see `Staged` for the three fields."""

    ahead: Tensor
    guesses: Tensor
    guesses_before: Tensor

    def right(self, status: Tensor) -> Tensor:
        """Return whether all guesses before each row were right, as `sampled_tokens` has it: [S] bool.

        Args:
            status: [3, S] int64, see `SamplerOutputs`.
        """
        tokens, _, allowed = status
        wrong = (self.ahead > 0) & ((tokens.roll(1) != self.guesses) | (allowed == 0))
        count = wrong.cumsum(0)
        first = torch.arange(len(count), device=count.device) - self.ahead
        right: Tensor = count == count[first]
        return right


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """The P of a step's S rows that have penalties. `rows`, `slots`: [P] int64. `guessed`: if any are."""

    table: PenaltyTable
    rows: Tensor
    slots: Tensor
    guessed: GuessedRows | None = None

    def apply(self, logits: Tensor) -> None:
        """Apply the penalties in place: repetition, then frequency, then presence.

        Repetition divides positive logits and multiplies negative ones, for tokens of prompt and answer alike
        (Keskar et al., "CTRL", 2019; negative logits as in transformers and vLLM). Frequency is subtracted
        once for each time a token was generated, presence once if it was generated (OpenAI's API reference).

        Args:
            logits: [S, vocab] float32.
        """
        values, seen = logits[self.rows], self.table.seen[self.slots]
        if self.guessed is not None:
            # These are copies: in a row after guesses, they count as generated for this row alone.
            places, tokens = self.guessed.guesses_before.view(2, -1)
            seen.index_put_((places, tokens), seen.new_full((), GENERATED), accumulate=True)
        repetition, presence, frequency = self.table.factors[:, self.slots, None]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen > 0, repeated, values)
        counts = seen >> 1
        values -= frequency * counts
        values -= presence * (counts > 0)
        logits[self.rows] = values

    def count(self, status: Tensor) -> None:
        """Count the sampled tokens, but for those after wrong guesses.

        Args:
            status: [3, S] int64, see `SamplerOutputs`; its ids are valid even in rows that failed.
        """
        seen, counted = self.table.seen, self.table.generated.expand(len(self.rows))
        if self.guessed is not None:
            counted = counted * self.guessed.right(status)[self.rows]
        places = torch.add(status[0, self.rows], self.slots, alpha=seen.shape[1])
        # One sequence may have several rows with the same token.
        seen.view(-1).scatter_add_(0, places, counted)


def slot_of(sequence: Sequence) -> int:
    """Return the slot of a running sequence.

    Raises:
        RuntimeError: it is not running; a bug in the engine.
    """
    if sequence.slot is None:
        raise RuntimeError(f"{sequence.request.request_id} holds no slot")
    return sequence.slot


def stage_slots(
    staging: Staging, decodes: list[Chunk], drafts: list[Chunk], prefills: list[Chunk], block_size: int
) -> None:
    """Stage the whole state of slots with prompts; of others, what has changed and the host must tell."""
    slots: list[int] = []
    columns: list[int] = []
    blocks: list[int] = []
    for chunk in decodes:
        if chunk.start % block_size == 0:
            column = chunk.start // block_size
            slots.append(slot_of(chunk.sequence))
            columns.append(column)
            blocks.append(chunk.sequence.blocks[column])
    for chunk in drafts:
        # An earlier step has told all blocks before.
        known, some = chunk.start // block_size, chunk.sequence.blocks
        slots += [slot_of(chunk.sequence)] * (len(some) - known)
        columns += range(known, len(some))
        blocks += some[known:]
    loaded: list[int] = []
    integers: list[int] = []
    floats: list[float] = []
    for chunk in prefills:
        sequence, slot = chunk.sequence, slot_of(chunk.sequence)
        params = sequence.request.sampling
        loaded.append(slot)
        integers += (chunk.end, sequence.generated, sequence.seed, params.top_k)
        floats += (params.temperature, params.top_p, params.min_p)
        slots += [slot] * len(sequence.blocks)
        columns += range(len(sequence.blocks))
        blocks += sequence.blocks
    staging.integers("loaded_slots", loaded)
    staging.integers("loaded_integers", integers)
    staging.floats("loaded_floats", floats)
    staging.integers("moved_slots", [slot_of(chunk.sequence) for chunk in drafts])
    staging.integers(
        "moved", [chunk.end for chunk in drafts] + [chunk.sequence.generated for chunk in drafts]
    )
    staging.integers("table_entries", slots + columns + blocks)


def stage_penalties(staging: Staging, prefills: list[Chunk]) -> None:
    """Stage the factors and all tokens so far of the sequences whose prompts end in a step."""
    loaded: list[int] = []
    factors: list[float] = []
    slots: list[int] = []
    tokens: list[int] = []
    values: list[int] = []
    for chunk in prefills:
        sequence, params = chunk.sequence, chunk.sequence.request.sampling
        if chunk.samples and params.penalised:
            seen = dict.fromkeys(sequence.request.prompt_ids, IN_PROMPT)
            for token_id in sequence.tokens[len(sequence.request.prompt_ids) :]:
                seen[token_id] = seen.get(token_id, 0) + GENERATED
            slot = slot_of(sequence)
            loaded.append(slot)
            factors += (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
            slots += [slot] * len(seen)
            tokens += seen
            values += seen.values()
    staging.integers("penalty_slots", loaded)
    staging.floats("penalty_factors", factors)
    staging.integers("seen", slots + tokens + values)
