"""Which sequences work in a step, on how many tokens, with which KV blocks. Knows nothing of tensors."""

from bisect import bisect_left, insort
from collections import deque
from operator import attrgetter

from triton_models.engine.batch import Batch, Chunk
from triton_models.engine.block_manager import BlockManager
from triton_models.engine.sequence import Sequence, SequenceState
from triton_models.engine.waiting_list import WaitingList

_rank = attrgetter("rank")


class Scheduler:
    """Mixes decodes and prompt chunks within a budget of tokens per step.

    * Every running decode has its token in every step, so a long prompt never stops the others. What is left
      goes to prompts by rank: one that outranks a prompt under way overtakes it.
    * A sequence is admitted when the blocks for all its known tokens are free, and takes them then: no prompt
      runs out of blocks halfway.
    * When a decode finds no block, the running sequence of the worst rank (priority, then arrival) gives up
      its blocks and waits again; its known tokens are computed anew later. The best-ranked one is never the
      victim, and any admitted sequence fits the whole cache alone, so some sequence always comes to its end.
    """

    def __init__(self, block_manager: BlockManager, *, max_running: int, max_batched_tokens: int) -> None:
        self._blocks = block_manager
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self.waiting = WaitingList()
        self.running: list[Sequence] = []
        """Sorted by rank."""

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its blocks."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence.request.request_id)
        else:
            self._stop_running(sequence)

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences whose deadline is at or before `now`, in monotonic seconds."""
        late = [
            each
            for each in self.running
            if each.request.deadline is not None and each.request.deadline <= now
        ]
        return late + self.waiting.expired(now)

    def schedule(self) -> Batch:
        """Choose the next step's work, empty only if there is none."""
        batch = Batch()
        self._schedule_decodes(batch)
        budget = self._max_batched_tokens - len(batch.decodes)
        prefilling = deque(each for each in self.running if each.state is SequenceState.PREFILL)
        while budget > 0:
            started = prefilling[0] if prefilling else None
            sequence = self._admit_before(started, batch) or started
            if sequence is None:
                break
            if sequence is started:
                prefilling.popleft()
            budget -= _prefill(sequence, budget, batch)
        return batch

    def _schedule_decodes(self, batch: Batch) -> None:
        decoding = [each for each in self.running if each.state is SequenceState.DECODE]
        for sequence in decoding:
            # Victims are taken from the end of the order, so one may be further on in this very list.
            if sequence.state is SequenceState.DECODE and self._make_room(sequence, batch):
                batch.decodes.append(Chunk(sequence, sequence.computed, 1))

    def _make_room(self, sequence: Sequence, batch: Batch) -> bool:
        """Give a decoding sequence the block its next token needs; False if it had to give up its own."""
        missing = self._blocks.blocks_for(sequence.computed + 1) - len(sequence.blocks)
        while missing > self._blocks.free:
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        if missing:
            self._take_blocks(sequence, missing, batch)
        return True

    def _admit_before(self, started: Sequence | None, batch: Batch) -> Sequence | None:
        """Admit the first waiting sequence if it outranks `started`, has a place and its blocks are free."""
        sequence = self.waiting.first()
        if sequence is None or (started is not None and started.rank < sequence.rank):
            return None
        needed = self._blocks.blocks_for(len(sequence.tokens))
        # A block more for each running sequence keeps the next few steps from preempting what is admitted
        # now. What this step preempted cannot come straight back: it needs more than it gave.
        if len(self.running) >= self._max_running or needed + len(self.running) > self._blocks.free:
            return None
        self.waiting.remove(sequence.request.request_id)
        sequence.move_to(SequenceState.PREFILL)
        insort(self.running, sequence, key=_rank)
        self._take_blocks(sequence, needed, batch)
        return sequence

    def _preempt(self, victim: Sequence, batch: Batch) -> None:
        self._stop_running(victim)
        victim.move_to(SequenceState.WAITING)
        victim.computed = 0
        self.waiting.add(victim)
        batch.preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
        self._blocks.release(sequence.blocks)
        sequence.blocks = []

    def _take_blocks(self, sequence: Sequence, count: int, batch: Batch) -> None:
        taken = self._blocks.allocate(count)
        sequence.blocks += taken
        batch.new_blocks += taken


def _prefill(sequence: Sequence, budget: int, batch: Batch) -> int:
    """Schedule as much of a prompt as the budget allows; returns the number of tokens."""
    count = min(len(sequence.tokens) - sequence.computed, budget)
    batch.prefills.append(Chunk(sequence, sequence.computed, count))
    return count
