"""Chooses the sequences of a step, their number of tokens and KV blocks. Knows nothing of tensors."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import attrgetter

from triton_models.engine.batch import Batch, Chunk
from triton_models.engine.block_manager import BlockManager
from triton_models.engine.bursts import BurstAllowance, StepPlan, ends_of_a_burst
from triton_models.engine.prefix_cache import PrefixCache
from triton_models.engine.sequence import Sequence, SequenceState
from triton_models.engine.waiting_list import WaitingList

_rank = attrgetter("rank")


class Scheduler:
    """Mixes decodes and prompt chunks within a token budget per step.

    * Every running decode gets its token in every step, so a long prompt never stalls the others. The rest of
      the budget goes to prompts by rank: one that outranks a prompt in progress overtakes it.
    * If several waiting prompts, of no worse priority than the decodes, fill `burst_tokens`, the step is that
      large. Only a burst of short prompts makes the decodes pause, and not for long: see `BurstAllowance`.
    * What another sequence computed is not computed again (`PrefixCache`). No sequence has to wait for a
      common beginning that is still being computed: when a sequence is admitted, all tokens of the sequences
      that outrank it are already scheduled, and can be found.
    * A sequence is admitted when the blocks for all its known tokens are free, and takes them then: no prompt
      runs out of blocks halfway.
    * When a decode finds no free block, the running sequence with the worst rank (priority, then arrival) is
      preempted: it gives up its blocks and waits again; its known tokens are recomputed later. The
      best-ranked one is never the victim, and any admitted sequence fits into the whole cache alone, so there
      is always progress.
    * A step may be scheduled while the tokens of the previous one are still in flight. What depends on
      their values waits for them: readmission after a preemption. (Token masks do, too, but only the sampling
      needs those: `Runner`.)

    Blocks and slots can be reused as soon as their holder stops, even if a launched step still writes there:
    later steps run after it on the same stream, and clear or fill them first.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_running: int,
        max_batched_tokens: int,
        prefix_cache: bool = True,
        burst_steps: int = 0,
        burst_tokens: int | None = None,
    ) -> None:
        self._blocks = block_manager
        self._burst = BurstAllowance(burst_steps)
        self._burst_tokens = burst_tokens or max_batched_tokens
        self._ends_of_a_burst = ends_of_a_burst(self._burst_tokens)
        self._prefixes = PrefixCache(block_manager, enabled=prefix_cache)
        self._max_running = max_running
        self._max_batched_tokens = max_batched_tokens
        self.waiting = WaitingList()
        self.running: list[Sequence] = []
        """Sorted by rank."""
        self._slots = list(range(max_running))
        """Free slots, as a heap: the lowest are used first, so that few sequences are close together."""

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence on the waiting list."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence, *, spoilt: bool = False) -> None:
        """Remove a sequence, waiting or running, and free its blocks.

        `spoilt`: what it computed cannot be trusted, and must not be found in the prefix cache.
        """
        if spoilt:
            self._prefixes.spoil(sequence)
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
        """Choose the next step's work; empty if there is none, or all of it depends on tokens in flight."""
        batch = Batch()
        plan = self._plan()
        if plan is StepPlan.PROMPTS:
            self._schedule_prompts(batch, self._burst_tokens)
        if batch.prefills:
            self._burst.stood_back()
            return batch
        self._burst.went_on()
        self._schedule_decodes(batch)
        budget = self._max_batched_tokens if plan is StepPlan.MIXED else self._burst_tokens
        self._schedule_prompts(batch, budget - len(batch.decodes))
        return batch

    def _schedule_prompts(self, batch: Batch, budget: int) -> None:
        prefilling = deque(each for each in self.running if each.state is SequenceState.PREFILL)
        while budget > 0:
            started = prefilling[0] if prefilling else None
            sequence = self._admit_before(started, batch) or started
            if sequence is None:
                break
            if sequence is started:
                prefilling.popleft()
                self._prefixes.catch_up(sequence)
            budget -= self._prefill(sequence, budget, batch)

    def _plan(self) -> StepPlan:
        """Choose the kind of step by the decodes and the waiting prompts.

        This is an estimate: it does not look up how much of the prompts is in the prefix cache.
        """
        decoding = [each.request.priority for each in self.running if each.state is SequenceState.DECODE]
        stand_back = bool(decoding) and self._burst.left
        if not stand_back and self._burst_tokens == self._max_batched_tokens:
            return StepPlan.MIXED
        most_urgent = min(decoding, default=None)  # not the first one's: waiting improves the rank, too
        tokens = prompts = ends = 0
        for each in self._next_prompts():
            if most_urgent is not None and each.request.priority > most_urgent:
                return StepPlan.MIXED
            tokens += len(each.tokens) - each.computed
            prompts += 1
            ends += tokens <= self._burst_tokens
            if tokens >= self._burst_tokens:
                break
        # Include the rest of a burst and whatever came meanwhile: one longer pause instead of two.
        if stand_back and tokens and self._burst.under_way:
            return StepPlan.PROMPTS
        if tokens < self._burst_tokens or prompts == 1:
            return StepPlan.MIXED
        return StepPlan.PROMPTS if stand_back and ends >= self._ends_of_a_burst else StepPlan.LARGE

    def _next_prompts(self) -> Iterator[Sequence]:
        """Yield prompts in progress, then those that could be admitted with the free slots and blocks."""
        yield from (each for each in self.running if each.state is SequenceState.PREFILL)
        places = self._max_running - len(self.running)
        blocks = self._blocks.available - len(self.running)
        for each in self.waiting:
            blocks -= self._blocks.blocks_for(len(each.tokens)) + 1
            places -= 1
            if each.in_flight or places < 0 or blocks < 0:
                return
            yield each

    def _prefill(self, sequence: Sequence, budget: int, batch: Batch) -> int:
        """Schedule as much of a prompt as the budget allows; returns the number of tokens."""
        start = sequence.computed
        count = min(len(sequence.tokens) - start, budget)
        batch.prefills.append(Chunk(sequence, start, count, start + count == sequence.length))
        self._prefixes.register(sequence, start + count)
        return count

    def _schedule_decodes(self, batch: Batch) -> None:
        block_size, decode = self._blocks.block_size, SequenceState.DECODE
        # Victims are taken from the end of this same list, never before the loop's current position.
        for sequence in self.running:
            if sequence.state is not decode:
                continue
            computed = sequence.computed
            if sequence.in_flight and computed + 1 >= sequence.max_length:
                continue
            if computed == len(sequence.blocks) * block_size and not self._make_room(sequence, batch):
                continue
            batch.decodes.append(Chunk(sequence, computed, 1, True))  # noqa: FBT003 - see Chunk

    def _make_room(self, sequence: Sequence, batch: Batch) -> bool:
        """Give a decoding sequence the block its next token needs; False if it was preempted itself."""
        self._prefixes.register(sequence, sequence.computed)
        while not self._blocks.available:
            victim = self.running[-1]
            self._preempt(victim, batch)
            if victim is sequence:
                return False
        self._take_blocks(sequence, 1, batch)
        return True

    def _admit_before(self, started: Sequence | None, batch: Batch) -> Sequence | None:
        """Admit the first waiting sequence if it outranks `started` and a slot and its blocks are free."""
        sequence = self.waiting.first()
        if sequence is None or (started is not None and started.rank < sequence.rank):
            return None
        if sequence.in_flight:
            return None
        if len(self.running) >= self._max_running:
            return None
        found = self._prefixes.find(sequence)
        needed = self._blocks.blocks_for(len(sequence.tokens)) - len(found)
        revived = sum(not self._blocks.references(block) for block in found)
        # One extra block per running sequence keeps the next few steps from preempting what is admitted now.
        # A sequence that this step preempted needs more blocks than it gave up, so it is readmitted at once
        # only if other sequences still hold some of those.
        if needed + revived + len(self.running) > self._blocks.available:
            return None
        self.waiting.remove(sequence.request.request_id)
        sequence.move_to(SequenceState.PREFILL)
        sequence.slot = heappop(self._slots)
        insort(self.running, sequence, key=_rank)
        self._blocks.retain(found)
        sequence.blocks = found
        self._prefixes.start(sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed
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
        # `computed` may include a token that is still in flight, and so not in `tokens` yet.
        self._prefixes.register(sequence, min(sequence.computed, len(sequence.tokens)))
        self._prefixes.stop(sequence)
        self._blocks.release(sequence.blocks)
        sequence.blocks = []
        if sequence.slot is not None:
            heappush(self._slots, sequence.slot)
            sequence.slot = None

    def _take_blocks(self, sequence: Sequence, count: int, batch: Batch) -> None:
        taken = self._blocks.allocate(count)
        sequence.blocks += taken
        batch.new_blocks += taken
