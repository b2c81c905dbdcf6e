"""Counts of the running sequences' tokens, on the device, and the penalties that follow from them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from triton_models.engine.sequence import Sequence
from triton_models.engine.slots import Staging, slot_of

IN_PROMPT = 1
"""The lowest bit of an entry of `PenaltyTable.seen`."""

GENERATED = 2
"""What each generated token adds to its entry: the bits above the lowest count them."""


class PenaltyTable:
    """A row of counts for every slot; only sequences with penalties use theirs.

    The host rebuilds a row from the known tokens in the step that ends a prompt: the first step that samples
    after an admission or a preemption. After that, each step that samples updates the counts on the device,
    since the host may be a token behind. Nothing here waits for the device.
    """

    def __init__(self, slots: int, vocabulary: int, device: torch.device) -> None:
        self.seen = torch.zeros((slots, vocabulary), dtype=torch.int32, device=device)
        """[slots, vocabulary] int32: `IN_PROMPT`, plus `GENERATED` for each time the token was generated."""
        self.repetition = torch.ones(slots, dtype=torch.float32, device=device)
        self.presence = torch.zeros(slots, dtype=torch.float32, device=device)
        self.frequency = torch.zeros(slots, dtype=torch.float32, device=device)

    @property
    def size_bytes(self) -> int:
        """Device memory of the counts."""
        return self.seen.nbytes

    def load(self, views: dict[str, Tensor]) -> None:
        """Load what `stage_penalties` has put into an uploaded step, if anything."""
        if "penalty_slots" not in views:
            return
        slots = views["penalty_slots"]
        self.repetition[slots] = views["penalty_repetition"].float()
        self.presence[slots] = views["penalty_presence"].float()
        self.frequency[slots] = views["penalty_frequency"].float()
        self.seen.index_fill_(0, slots, 0)
        prompts = views["seen_prompt_slots"], views["seen_prompt_ids"]
        self.seen.index_put_(prompts, torch.full_like(prompts[0], IN_PROMPT, dtype=torch.int32))
        answers = views["seen_answer_slots"], views["seen_answer_ids"]
        added = torch.full_like(answers[0], GENERATED, dtype=torch.int32)
        self.seen.index_put_(answers, added, accumulate=True)


@dataclass(frozen=True, slots=True)
class PenalisedRows:
    """The P of a step's S rows that have penalties. `rows`, `slots`: [P] int64."""

    table: PenaltyTable
    rows: Tensor
    slots: Tensor

    def apply(self, logits: Tensor) -> None:
        """Apply the penalties in place: repetition, then frequency, then presence.

        Repetition divides positive logits and multiplies negative ones, for tokens of prompt and answer alike
        (Keskar et al., "CTRL", 2019; negative logits as in transformers and vLLM). Frequency is subtracted
        once for each time a token was generated, presence once if it was generated (OpenAI's API reference).

        Args:
            logits: [S, vocab] float32.
        """
        values, seen = logits[self.rows], self.table.seen[self.slots]
        repetition = self.table.repetition[self.slots, None]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(seen > 0, repeated, values)
        counts = seen >> 1
        values -= self.table.frequency[self.slots, None] * counts
        values -= self.table.presence[self.slots, None] * (counts > 0)
        logits[self.rows] = values

    def count(self, tokens: Tensor) -> None:
        """Count the sampled tokens: [S] int64, valid ids even in rows that failed."""
        self.table.seen[self.slots, tokens[self.rows]] += GENERATED


def stage_penalties(staging: Staging, loaded: list[Sequence]) -> None:
    """Stage the parameters and all tokens so far of the sequences in `loaded`; nothing if there are none."""
    if not loaded:
        return
    prompts: list[tuple[int, int]] = []
    answers: list[tuple[int, int]] = []
    for sequence in loaded:
        slot, prompt = slot_of(sequence), sequence.request.prompt_ids
        prompts += [(slot, id_) for id_ in prompt]
        answers += [(slot, id_) for id_ in sequence.tokens[len(prompt) :]]
    params = [sequence.request.sampling for sequence in loaded]
    staging.integers("penalty_slots", [slot_of(sequence) for sequence in loaded])
    staging.floats("penalty_repetition", [each.repetition_penalty for each in params])
    staging.floats("penalty_presence", [each.presence_penalty for each in params])
    staging.floats("penalty_frequency", [each.frequency_penalty for each in params])
    staging.integers("seen_prompt_slots", [slot for slot, _ in prompts])
    staging.integers("seen_prompt_ids", [id_ for _, id_ in prompts])
    staging.integers("seen_answer_slots", [slot for slot, _ in answers])
    staging.integers("seen_answer_ids", [id_ for _, id_ in answers])
