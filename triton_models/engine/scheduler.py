"""Chooses the sequences of a step, their number of tokens and KV blocks. Knows nothing of tensors."""

import math
from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from operator import attrgetter

from triton_models.engine.blocks import BlockManager
from triton_models.engine.drafts import Allowance, DraftLimits
from triton_models.engine.prefix import PrefixCache
from triton_models.engine.sequence import Chunk, Sequence, SequenceState
from triton_models.engine.settings import EngineSettings
from triton_models.engine.step import Step
from triton_models.engine.step_times import StepTimes

_rank = attrgetter("rank")

_REGAINED_IN = 32
"""Number of steps with decodes that earn one more step without them."""

_FEW_ROWS = 32
"""Rows that may sample in one step although `max_running`, for which memory was measured, is less."""

_LOOKED_AT = 16
_IN_VAIN = 16
"""Looking for guesses takes the host up to 40 us for each sequence. After `_IN_VAIN` looks in a row that
found too little, only about `_LOOKED_AT` sequences tell whether it is worth looking at all, and the next look
is later the more there are."""

LOGITS_ROWS = 64
"""Tokens of a step, of all prompts together, whose logits are reported. For a vocabulary of 250,000 ids they
take 64 MB."""

_TOKENS_PER_END = 512
"""A step that pauses the decodes must finish at least one prompt per this many tokens: the first tokens of
several requests are worth a pause, the middle of long prompts is not."""

_LARGE_STEPS = 6
"""A burst that fills fewer of the largest steps is computed in usual ones, beside the decodes. First tokens
come at the end of a step: of a few large ones, half of the clients wait for the last (bench/LOG.md)."""


def least_ends(tokens: int) -> int:
    """Return how many prompts a step of this many tokens must finish to make decodes pause."""
    return max(2, tokens // _TOKENS_PER_END)


class BurstAllowance:
    """Limits the steps that leave the decodes out: `most` in a row, and few in the long run.

    Prompts that arrive together are computed soonest if those of them that are already decoding pause;
    clients that start together then also continue together. But all other answers in progress wait
    meanwhile. So there is a stock of `4 * most` such steps, used in runs of at most `most`. It regains one
    for every 32 steps with decodes: under sustained load, one step in 33 leaves the decodes out.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._full = 4 * most * _REGAINED_IN
        self._stock = self._full
        """In fractions of a step."""
        self._in_a_row = 0

    @property
    def left(self) -> bool:
        """Whether the decodes may pause in the next step."""
        return self._in_a_row < self._most and self._stock >= _REGAINED_IN

    @property
    def under_way(self) -> bool:
        """Whether the decodes paused in the last step."""
        return self._in_a_row > 0

    def paused(self) -> None:
        """Count a step that left the decodes out."""
        self._in_a_row += 1
        self._stock -= _REGAINED_IN

    def resumed(self) -> None:
        """Count a step with every decode in it."""
        self._in_a_row = 0
        self._stock = min(self._stock + 1, self._full)


class WaitingList:
    """Lower priority first, equal ones in order of arrival; `PRIORITY_S` of waiting are worth one level.

    So no sequence starves behind a stream of more urgent ones. A preempted sequence keeps its rank, which
    puts it at the head of its priority: whatever waits there came later. The list has no limit of its own:
    `Engine.add` refuses new requests, and a preempted sequence must always have a place.
    """

    def __init__(self) -> None:
        # Sorted by rank. Moving a few hundred pointers costs less than a heap that must forget removed
        # entries.
        self._order: list[Sequence] = []
        self._earliest_deadline = math.inf
        """No waiting sequence's deadline is before this."""

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._order)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence in order."""
        insort(self._order, sequence, key=_rank)
        if sequence.request.deadline is not None:
            self._earliest_deadline = min(self._earliest_deadline, sequence.request.deadline)

    def first(self) -> Sequence | None:
        """Return the first sequence, without removing it."""
        return self._order[0] if self._order else None

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence, wherever it is."""
        del self._order[bisect_left(self._order, sequence.rank, key=_rank)]

    def expired(self, now: float) -> list[Sequence]:
        """Return the sequences whose deadline is at or before `now`, in monotonic seconds."""
        if now < self._earliest_deadline:
            return []
        deadlines = [
            (each.request.deadline, each) for each in self._order if each.request.deadline is not None
        ]
        self._earliest_deadline = min((deadline for deadline, _ in deadlines), default=math.inf)
        return [sequence for deadline, sequence in deadlines if deadline <= now]


class Scheduler:
    """Mixes decodes and prompt chunks within a token budget per step.

    * Every running decode gets its token in every step, so a long prompt never stalls the others. The rest of
      the budget goes to prompts by rank: one that outranks a prompt in progress overtakes it.
    * Prompts are cut where the device computes a row in the least time: see `StepTimes`.
    * If waiting prompts, of no worse priority than the decodes, fill `burst_tokens` six times, the step is
      that large. Only such a burst, of short prompts, makes the decodes pause, and not for long: see
      `BurstAllowance`.
    * What another sequence computed is not computed again (`PrefixCache`). No sequence has to wait for a
      common beginning that is still being computed: when a sequence is admitted, all tokens of the sequences
      that outrank it are already scheduled, and can be found.
    * A sequence is admitted when the blocks for all its known tokens are free, and takes them then: no prompt
      runs out of blocks halfway.
    * When a decode finds no free block, the running sequence with the worst rank (priority, then arrival) is
      preempted: it gives up its blocks and waits again; its known tokens are recomputed later. The
      best-ranked one is never the victim, and any admitted sequence fits into the whole cache alone, so there
      is always progress.
    * Guesses at next tokens (`Drafter`) need the tokens in flight to be known. Where they are worth it, every
      decode waits for these: a step without those that need not wait takes as long as one with them.
      Decodes have guesses only in half of a step, so that prompts go on.
    * Of prompts whose logits are reported, a step has at most `LOGITS_ROWS` tokens: each of them costs the
      memory and the time of a decode's logits.
    * A step may be scheduled while the tokens of the previous one are still in flight. What depends on
      their values waits for them: readmission after a preemption. (Token masks do, too, but only the sampling
      needs those: `Runner`.)

    Blocks and slots can be reused as soon as their holder stops, even if a launched step still writes there:
    later steps run after it on the same stream, and clear or fill them first.

    Attributes:
        drafts: what guesses may cost.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        settings: EngineSettings,
        drafts: DraftLimits | None = None,
        times: StepTimes | None = None,
    ) -> None:
        self._blocks = block_manager
        self._burst = BurstAllowance(settings.burst_steps)
        self._burst_tokens = settings.largest_step
        self._in_burst = False
        """Whether so many are computed in a step: from when several such steps wait until none does."""
        self._prefixes = PrefixCache(block_manager)
        self._draft_tokens = settings.draft_tokens
        self._in_vain = self._not_looking = 0
        """Number of looks for guesses in a row that found too little, and of steps without one to come."""
        self.drafts = drafts or DraftLimits()
        self._times = times or StepTimes()
        self._max_running = settings.max_running
        self._max_batched_tokens = settings.max_batched_tokens
        self.waiting = WaitingList()
        self.running: list[Sequence] = []
        """Sorted by rank."""
        self._slots = list(range(settings.max_running))
        """Free slots, as a heap: the lowest are used first, so that few sequences are close together."""

    def add(self, sequence: Sequence) -> None:
        """Put a new sequence on the waiting list."""
        self._prefixes.find(sequence)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence, *, invalid: bool = False) -> None:
        """Remove a sequence, waiting or running, and free its blocks.

        `invalid`: what it computed cannot be trusted, nor what it found (the writer may have ended before its
        results were seen) and others go on from. So the prefix cache is emptied.
        """
        if invalid:
            self._prefixes.clear()
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
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

    def schedule(self) -> Step:
        """Choose the next step's work; empty if there is none, or all of it depends on tokens in flight."""
        step = Step()
        budget, pause = self._plan()
        if pause:
            self._schedule_prompts(step, budget)
        if step.prefills:
            self._burst.paused()
            return step
        decoding = [each for each in self.running if each.state is SequenceState.DECODE]
        if any(each.in_flight and each.drafted for each in decoding):
            return step
        allowance = self._allowance(decoding)
        if allowance is not None and any(each.in_flight for each in decoding):
            return step  # Guesses are made once the tokens in flight are known.
        self._burst.resumed()
        self._schedule_decodes(decoding, allowance, step)
        rows = len(step.decodes) + sum(each.count for each in step.drafts)
        self._schedule_prompts(step, self._room(rows, budget) - rows)
        return step

    def _schedule_prompts(self, step: Step, budget: int) -> None:
        prefilling = deque(each for each in self.running if each.state is SequenceState.PREFILL)
        while budget > 0:
            started = prefilling[0] if prefilling else None
            sequence = self._admit_before(started, step) or started
            if sequence is None:
                break
            if sequence is started:
                prefilling.popleft()
            budget -= self._prefill(sequence, budget, step)

    def _plan(self) -> tuple[int, bool]:
        """Return the next step's budget of tokens, and whether the decodes should pause.

        A larger step spreads its fixed cost over more tokens, and is worth it where many prompts wait.
        """
        mixed = self._max_batched_tokens, False
        decoding = [each.request.priority for each in self.running if each.state is SequenceState.DECODE]
        may_pause = bool(decoding) and self._burst.left
        if not may_pause and self._burst_tokens == self._max_batched_tokens:
            return mixed
        # Not the first one's priority: waiting improves the rank, too.
        sums = self._burst_of(min(decoding, default=None))
        tokens, size = sums[-1] if sums else 0, self._burst_tokens
        # Include the rest of a burst and whatever came meanwhile: one longer pause instead of two.
        if may_pause and tokens and self._burst.under_way:
            return min(tokens, size), True
        self._in_burst = tokens >= (size if self._in_burst else _LARGE_STEPS * size)
        if not self._in_burst or len(sums) == 1:
            return mixed
        return size, may_pause and bisect_right(sums, size) >= least_ends(size)

    def _burst_of(self, most_urgent: int | None) -> list[int]:
        """Return how many tokens wait with each further prompt of a burst, none less urgent than this.

        Not more of them than matter to `_plan`. An estimate: what was cached when they came may be gone.
        """
        sums: list[int] = []
        tokens = 0
        for each in self._next_prompts():
            if most_urgent is not None and each.request.priority > most_urgent:
                break
            if each.request.logits:
                continue  # which a step has only a few rows of
            if each.request.since is not None:
                continue  # nearly all of it is cached
            tokens += self._missing(each)
            sums.append(tokens)
            if tokens >= _LARGE_STEPS * self._burst_tokens:
                break
        return sums

    def _room(self, rows: int, budget: int) -> int:
        """Return the rows of a step that has so many without prompts: `budget`, or what is computed faster.

        An estimate, as `_plan` is.
        """
        if not self._times.sizes or budget > self._max_batched_tokens:
            return budget
        most = rows
        for each in self._next_prompts():
            if not each.request.logits and each.request.since is None:  # as in `_plan`
                most += self._missing(each)
            if most > budget:
                break
        best = self._times.best(rows, min(most, budget), rest=most > budget)
        return best if best < most else budget

    def _missing(self, sequence: Sequence) -> int:
        """Return how many tokens of a prompt are to compute."""
        return len(sequence.tokens) - (sequence.computed or len(sequence.found) * self._blocks.block_size)

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

    def _prefill(self, sequence: Sequence, budget: int, step: Step) -> int:
        """Schedule as much of a prompt as the budget allows; returns the number of tokens."""
        start = sequence.computed
        count = min(len(sequence.tokens) - start, budget)
        if sequence.request.logits:
            count = min(count, LOGITS_ROWS - step.logits_rows)
            step.logits_rows += count
            if not count:
                return 0
        step.prefills.append(Chunk(sequence, start, count, start + count == sequence.length))
        self._prefixes.register(sequence, start + count)
        return count

    def _schedule_decodes(self, decoding: list[Sequence], allowance: Allowance | None, step: Step) -> None:
        """Schedule the next token of each of these, and guesses."""
        block_size = self._blocks.block_size
        for sequence in decoding:
            # One may have been preempted for another before it; never one that is scheduled already.
            if sequence.state is not SequenceState.DECODE:
                continue
            computed = sequence.computed
            if sequence.in_flight and computed + 1 >= sequence.max_length:
                continue
            if sequence.drafted or computed % block_size == 0:
                self._prefixes.register(sequence, computed)
            if computed == len(sequence.blocks) * block_size and not self._make_room(sequence, step):
                continue
            guesses = self._guess(sequence, allowance, step) if allowance else ()
            chunk = Chunk(sequence, computed, 1 + len(guesses), True, guesses)  # noqa: FBT003 - see Chunk
            (step.drafts if guesses or sequence.drafted else step.decodes).append(chunk)
            sequence.drafted = bool(guesses)

    def _allowance(self, decoding: list[Sequence]) -> Allowance | None:
        """Return what guesses each of these may have in the next step; None where they are not worth it."""
        if not self._draft_tokens or not decoding:
            return None
        if self._not_looking:
            self._not_looking -= 1
            return None
        rows = min(self.drafts.rows, self._max_batched_tokens // 2, max(self._max_running, _FEW_ROWS))
        most = min(self._draft_tokens, rows // len(decoding) - 1)
        if most < 1:
            return None
        allowance = self.drafts.allowance(most, len(decoding))
        apart = -(-len(decoding) // _LOOKED_AT) if self._in_vain >= _IN_VAIN else 1
        some = decoding[self._in_vain % apart :: apart]
        if self._worthwhile(some, decoding, allowance) and (
            apart == 1 or self._worthwhile(decoding, decoding, allowance)
        ):
            self._in_vain = 0
            return allowance
        self._in_vain += 1
        self._not_looking = apart - 1
        return None

    def _worthwhile(self, some: list[Sequence], decoding: list[Sequence], allowance: Allowance) -> bool:
        """Whether guesses are worth it for all decoding sequences if the others are like these."""
        right, guesses = 0.0, 0
        for each in some:
            expected, made = each.drafter.expects(each.tokens, allowance, flying=each.in_flight > 0)
            right += expected
            guesses += made
        share = len(some) / len(decoding)
        masks = sum(each.masked for each in decoding)
        return self.drafts.worthwhile(right / share, guesses / share, len(decoding), masks)

    def _guess(self, sequence: Sequence, allowance: Allowance, step: Step) -> tuple[int, ...]:
        """Guess a decoding sequence's next tokens; takes the blocks for them.

        Guesses take no block that another sequence may need soon. The last token needs no guess: it is drawn
        after the one before.
        """
        free = max(0, self._blocks.available - len(self.running))
        room = (len(sequence.blocks) + free) * self._blocks.block_size - sequence.length
        most = min(allowance.most, room, sequence.max_length - sequence.length - 1)
        if most < 1:
            return ()
        guesses = sequence.drafter.draft(sequence.tokens, Allowance(most, allowance.row))
        missing = self._blocks.blocks_for(sequence.length + len(guesses)) - len(sequence.blocks)
        if missing > 0:
            self._take_blocks(sequence, missing, step)
        return guesses

    def _make_room(self, sequence: Sequence, step: Step) -> bool:
        """Give a decoding sequence the block its next token needs; False if it was preempted itself."""
        while not self._blocks.available:
            victim = self.running[-1]
            self._preempt(victim, step)
            if victim is sequence:
                return False
        self._take_blocks(sequence, 1, step)
        return True

    def _admit_before(self, started: Sequence | None, step: Step) -> Sequence | None:
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
        self.waiting.remove(sequence)
        sequence.move_to(SequenceState.PREFILL)
        sequence.slot = heappop(self._slots)
        insort(self.running, sequence, key=_rank)
        self._blocks.retain(found)
        sequence.blocks = found.copy()
        self._prefixes.start(sequence)
        self._take_blocks(sequence, needed - self._take_tail(sequence, step), step)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, len(sequence.request.prompt_ids))
        return sequence

    def _take_tail(self, sequence: Sequence, step: Step) -> bool:
        """Give a starting sequence the block that goes on where those that it found end, if it is there."""
        found = self._prefixes.tail(sequence)
        if found is None:
            return False
        tail, tokens = found
        sequence.computed += tokens
        if sequence.request.shares_tail:
            (copy,) = self._blocks.allocate(1)
            sequence.blocks.append(copy)
            step.copies.append((tail, copy))
        else:
            self._prefixes.take(sequence, tail)
        return True

    def _preempt(self, victim: Sequence, step: Step) -> None:
        self._stop_running(victim)
        victim.move_to(SequenceState.WAITING)
        victim.computed = 0
        self.add(victim)
        step.preemptions += 1

    def _stop_running(self, sequence: Sequence) -> None:
        del self.running[bisect_left(self.running, sequence.rank, key=_rank)]
        # `computed` may include a token that is still in flight, and so not in `tokens` yet.
        self._prefixes.stop(sequence, min(sequence.computed, len(sequence.tokens)))
        self._blocks.release(sequence.blocks)
        sequence.blocks = []
        if sequence.slot is not None:
            heappush(self._slots, sequence.slot)
            sequence.slot = None
        sequence.drafted = False

    def _take_blocks(self, sequence: Sequence, count: int, step: Step) -> None:
        taken = self._blocks.allocate(count)
        sequence.blocks += taken
        step.new_blocks += taken
