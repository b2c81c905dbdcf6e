"""Guesses at the next tokens: fewer steps, the same answers."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.triton_models.engine.fake_model import GREEDY, FakeModel, ids, logits_of, request, run
from tests.triton_models.engine.guessed_mix import (
    CYCLE,
    END,
    GRAMMARS,
    KINDS,
    TOKENIZER,
    some_requests,
)
from triton_models.engine.backend import PLAIN, Backend
from triton_models.engine.drafts import Allowance, Drafter, DraftLimits, best
from triton_models.engine.engine import Engine, StepStats
from triton_models.engine.models import Operations
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, TokenOutput
from triton_models.engine.settings import EngineSettings
from wire.grammar import Grammar

OVERLAPPED = replace(PLAIN, overlap=True, drafts=DraftLimits(rows=256, wait_s=0.006))
SETTINGS = EngineSettings(
    max_running=6, max_waiting=500, max_batched_tokens=40, block_size=4, kv_blocks=100, draft_tokens=8
)


COPYING = SamplingParams(temperature=0.0)


class Copier(FakeModel):
    """Likes to count up in a cycle, and sometimes does something else: how often depends on all tokens."""

    def __init__(self, *, liking: float = 9.0) -> None:
        super().__init__()
        self._liking = liking

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        return torch.cat([super().forward(tokens, operations), tokens.float()[:, None]], dim=1)

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        logits = logits_of(hidden[:, 0])
        logits[torch.arange(len(hidden)), (hidden[:, 1].long() + 1) % CYCLE] += self._liking
        return logits


class Writer(FakeModel):
    """Writes an answer after a prompt of one token."""

    def __init__(self, answer: Sequence[int]) -> None:
        super().__init__()
        self._answer = answer

    def forward(self, tokens: Tensor, operations: Operations) -> Tensor:
        return torch.cat([super().forward(tokens, operations), operations.positions[:, None]], dim=1)

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        logits = logits_of(hidden[:, 0])
        for row, position in enumerate(hidden[:, 1].long().tolist()):
            logits[row, self._answer[min(position, len(self._answer) - 1)]] += 1000.0
        return logits


class Known:
    """A mask that allows one text, and says so; its calls named `failing` raise."""

    def __init__(self, text: Sequence[int], *, failing: str = "") -> None:
        self.text = text
        self.failing = failing
        self.told = 0

    def fill(self, words: Tensor) -> None:
        words[self.text[self.told] // 32] |= 1 << self.text[self.told] % 32

    def accept(self, token_id: int) -> None:
        assert token_id == self.text[self.told]
        self.told += 1

    def forced(self) -> Sequence[int]:
        self._fail("forced")
        return self.text[self.told :]

    def takes(self, tokens: Sequence[int]) -> int:
        self._fail("takes")
        left = self.text[self.told :]
        return next((at for at, each in enumerate(tokens) if [each] != left[at : at + 1]), len(tokens))

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        for at, row in enumerate(rows, self.told + 1):
            row[self.text[at] // 32] |= 1 << self.text[at] % 32
            self._fail("fill_ahead")

    def _fail(self, name: str) -> None:
        if name == self.failing:
            raise ZeroDivisionError


def engine(model: FakeModel, backend: Backend = PLAIN, **changes: int) -> Engine:
    return Engine(model, replace(SETTINGS, **changes), backend=backend)


FREE = Allowance(8, 0.0)
"""Eight guesses, whose rows take no time."""


def test_what_followed_the_newest_tokens_before_is_guessed() -> None:
    assert Drafter().draft([1, 2, 3, 4, 5, 9, 2, 3], FREE) == ()
    assert Drafter().draft([1, 2, 3, 4, 5, 9, 2, 3, 4], FREE)[:2] == (5, 9)
    assert Drafter().draft([1, 2, 3, 4, 5, 9, 2, 3, 4], Allowance(1, 0.0)) == (5,)


def test_of_several_places_the_last_counts_or_the_one_with_the_longer_text_in_front() -> None:
    assert Drafter().draft([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 2, 3, 4], FREE)[:2] == (7, 2)
    assert Drafter().draft([1, 2, 3, 4, 5, 9, 2, 3, 4, 7, 1, 2, 3, 4], FREE)[:2] == (5, 9)


def test_a_text_is_followed_although_its_words_stand_elsewhere_too() -> None:
    drafter, known = Drafter(), [1, 2, 3, 4, 5, 6, 7, 8, 30, 3, 4, 5, 40, 1, 2, 3]
    assert drafter.draft(known, Allowance(2, 0.0)) == (4, 5)
    assert drafter.draft([*known, 4, 5], Allowance(2, 0.0)) == (6, 7)  # not 40


def test_a_text_that_was_changed_goes_on_as_it_was() -> None:
    text = [*range(1, 60)]
    for changed in (
        [*range(1, 20), 90],  # one token for another
        [*range(1, 20), 90, 21, 91],
        [*range(1, 20), 21],  # one left out
        [*range(1, 20), 20, 90, 91, 20],  # and some put in
    ):
        drafter = Drafter()
        known = text + changed[:10]
        for token in changed[10:]:
            assert drafter.draft(known, FREE)
            known.append(token)
        follows = changed[-1] + 1 if changed[-1] < 90 else changed.index(changed[-1]) + 2
        assert drafter.draft(known, FREE)[0] == follows


def test_a_text_that_was_left_is_given_up() -> None:
    drafter = Drafter()
    known = [*range(1, 60), *range(1, 20)]
    found: list[bool] = []
    for token in range(100, 110):
        assert drafter.draft(known, FREE) or found[7:]
        known.append(token)
        found.append(bool(drafter.draft(known, FREE)))
    assert found == [True] * 8 + [False] * 2


def test_bytes_that_are_no_token_are_passed_over() -> None:
    # The bytes of 1, 1, 1, shifted by one, stand within those of 256 and its like.
    two = Allowance(2, 0.0)
    assert Drafter().draft([7, 1, 1, 1, 8, 256, 256, 256, 256, 1, 1, 1], two) == (8, 256)
    assert Drafter().draft([256, 256, 256, 256, 5, 1, 1, 1], two) == ()
    # And those of 1 within those of 256, where a changed text is looked for.
    drafter, known = Drafter(), [256, 1, 5, 6, 7, 8, 256, 1, 5, 6]
    assert drafter.draft(known, two) == (7, 8)
    assert drafter.draft([*known, 1], two) == (5, 6)


def test_nothing_is_guessed_that_ends_the_answer_or_follows_its_end() -> None:
    known = [1, 2, 3, 4, 9, 5, 0, 1, 2, 3]
    two = Allowance(2, 0.0)
    assert Drafter().draft(known, two) == (4, 9)
    assert Drafter(stop_ids=frozenset({9})).draft(known, two) == (4,)
    assert Drafter(stop_ids=frozenset({4})).draft(known, two) == ()


def test_a_text_that_must_come_is_guessed_whole_and_copies_as_far_as_the_mask_takes_them() -> None:
    known = [1, 2, 3, 4, 9, 5, 0, 1, 2, 3]
    drafter = Drafter(Known([7, 8, 7, 8, 6]))
    assert drafter.draft(known, Allowance(3, 0.0)) == (7, 8, 7)
    assert drafter.draft(known, FREE) == (7, 8, 7, 8, 6)  # the mask does not take 4
    assert Drafter(Known([4, 8, 6])).draft(known, FREE) == (4, 8, 6)
    assert Drafter(Known([4])).draft(known, FREE) == (4,)


def test_texts_that_must_come_and_do_not_are_believed_less() -> None:
    mask = Known([7, 8, 6, 7, 8, 6])
    drafter, known, lengths = Drafter(mask), [1], []
    for _ in range(6):
        lengths.append(len(drafter.draft(known, Allowance(8, 0.4))))
        known = [*known, 5]  # as if it had been split into other tokens
    assert lengths[0] == 6
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] == 0


def test_of_a_text_that_must_follow_the_first_token_may_be_in_flight() -> None:
    drafter = Drafter(Known([7, 8, 6]))
    assert drafter.expects([1], FREE, flying=True) == (2, 2)
    for none_left in (Drafter(Known([7])), Drafter(Known([])), Drafter()):
        assert none_left.expects([1], FREE, flying=True) == (0, 0)
    assert drafter.draft([1, 7], FREE) == (7, 8, 6)


def test_what_could_have_been_guessed_tells_how_much_is() -> None:
    """Tokens count whether they were guessed or not, so trust is gained and lost without guesses, too."""
    some, text = Allowance(20, 0.1), [*range(1, 60)]
    drafter, known, lengths = Drafter(), [*text, 1, 2, 3], []
    for token in range(4, 20):
        lengths.append(len(drafter.draft(known, some)))
        known.append(token)
    assert lengths == sorted(lengths)
    assert lengths[0] < 3
    assert lengths[-1] > 10
    for token in range(100, 200, 2):
        drafter.expects(known, some)
        known += [token, token + 1, 7, 8, 9]  # found again, and left again
    assert drafter.expects(known, some) == (0, 0)
    assert Drafter().expects(known, some)[0]


def test_a_token_in_flight_must_be_right_too() -> None:
    known = [1, 2, 3, 4, 5, 9, 2, 3, 4]
    drafter = Drafter()
    assert 0 < drafter.expects(known, FREE, flying=True)[0] < drafter.expects(known, FREE)[0]


@pytest.mark.parametrize("row", [0.0, 0.02, 0.1, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("percent", [1, 30, 60, 80, 95, 99])
def test_no_other_number_of_guesses_gives_more_tokens_for_their_time(percent: int, row: float) -> None:
    likely = percent / 100

    def rate(length: int) -> float:
        return sum(likely**each for each in range(length + 1)) / (1 + row * length)

    length, right = best(percent, Allowance(16, row))
    assert right == pytest.approx(sum(likely**each for each in range(1, length + 1)))
    assert rate(length) == pytest.approx(max(rate(each) for each in range(17)))


def test_what_a_row_takes_counts_more_beside_other_sequences() -> None:
    limits = DraftLimits(step_s=0.020, row_s=0.001)
    assert limits.allowance(8, 1) == Allowance(8, 0.05)
    # Of eight sequences, each has an eighth of a step of 27 ms.
    assert limits.allowance(8, 8).row == pytest.approx(0.001 / (0.027 / 8))


def test_guesses_are_worth_it_where_they_bring_more_tokens_a_second() -> None:
    limits = DraftLimits(step_s=0.004, row_s=0.0001, wait_s=0.001, wait_more_s=0.0001)
    # 8 sequences: 4.7 ms. With 20 guesses, 4.7 + 1.8 + 2 = 8.5: they need 8 * 3.8 / 4.7 = 6.47 tokens more.
    assert limits.worthwhile(6.5, 20, 8)
    assert not limits.worthwhile(6.4, 20, 8)
    assert not DraftLimits().worthwhile(0, 0, 1)
    # With 3 masks that take 0.2 ms each, they need 8 * 4.4 / 4.7 = 7.49.
    masked = replace(limits, mask_s=0.0002)
    assert masked.worthwhile(7.5, 20, 8, masks=3)
    assert not masked.worthwhile(7.4, 20, 8, masks=3)


def test_an_engine_guesses_by_the_times_it_was_told() -> None:
    rows = {}
    for row_s in (0.0001, 0.020):
        made = engine(Copier(liking=1000.0))
        made.note_times(0.020, row_s)
        made.add(request("a", range(CYCLE), replace(COPYING, max_tokens=60)))
        rows[row_s] = max(each.guessed_tokens for each in steps_of(made))
    assert rows[0.0001] == 8
    assert rows[0.020] == 0


def test_guesses_that_are_not_worth_their_rows_are_not_made() -> None:
    known = [1, 2, 3, 4, 5, 9, 2, 3, 4]
    assert Drafter().draft(known, Allowance(8, 0.4))
    assert not Drafter().draft(known, Allowance(8, 0.6))
    assert Drafter().expects(known, Allowance(8, 0.6)) == (0, 0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
@pytest.mark.parametrize("blocks", [100, 34], ids=["room", "preemptions"])
def test_every_answer_is_the_one_without_guesses(backend: Backend, blocks: int, kind: str) -> None:
    """500 requests in all."""
    plain, _ = answers(backend, 0, blocks, kind)
    drafted, right = answers(backend, 8, blocks, kind)
    assert drafted.keys() == plain.keys()
    for key, outputs in plain.items():
        assert ids(drafted[key]) == ids(outputs)
        assert drafted[key][-1].finish_reason == outputs[-1].finish_reason
        assert drafted[key][-1].error == outputs[-1].error
        assert outputs[-1].error != "the request's token mask failed"
        assert numbers(drafted[key]) == pytest.approx(numbers(outputs), abs=1e-4)
    assert right > 10


def answers(
    backend: Backend, draft_tokens: int, blocks: int, kind: str
) -> tuple[dict[str, list[TokenOutput]], int]:
    """The outputs by request, and how many guesses were right."""
    made = engine(Copier(), backend, draft_tokens=draft_tokens, kv_blocks=blocks)
    made.add(*some_requests(32, kind, seed=2 * blocks + backend.overlap))
    outputs: dict[str, list[TokenOutput]] = {}
    right = 0
    while made.open_requests:
        stats = made.step()
        right += stats.right_guesses if stats else 0
        for output in made.take_outputs():
            outputs.setdefault(output.request_id, []).append(output)
    assert made.stats().kv_blocks_used == 0
    assert made.stats().failed_steps == 0
    assert blocks == 100 or made.stats().preemptions
    return outputs, right


def numbers(outputs: list[TokenOutput]) -> list[float]:
    """Every log-probability that was reported, the answer's and then the prompt's."""
    told = [each.logprobs for each in outputs if each.logprobs]
    told += [one for each in outputs for one in each.prompt_logprobs]
    return [number for each in told for number in (each.logprob, *(value for _, value in each.top))]


def steps_of(made: Engine) -> list[StepStats]:
    stats = []
    while made.open_requests:
        step = made.step()
        assert step is not None
        stats.append(step)
    return stats


@pytest.mark.parametrize("backend", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
def test_copying_takes_few_steps(backend: Backend) -> None:
    made = engine(Copier(liking=1000.0), backend)
    made.add(request("a", range(CYCLE), SamplingParams(temperature=0.0, max_tokens=100)))
    stats = steps_of(made)
    assert sum(each.decode_tokens for each in stats) == 99
    assert sum(each.right_guesses for each in stats) == 99 - (len(stats) - 1)
    assert len(stats) < 25
    assert not made.stats().kv_blocks_used


def test_sequences_that_copy_together_stay_together() -> None:
    made = engine(Copier(liking=1000.0), OVERLAPPED, max_batched_tokens=128)
    made.add(*(request(str(each), range(CYCLE), replace(COPYING, max_tokens=60)) for each in range(6)))
    stats = steps_of(made)
    assert {each.batch_size for each in stats} == {6}
    assert len(stats) < 60 // 3


def test_the_device_has_the_next_guesses_before_the_last_ones_are_delivered() -> None:
    model = Copier(liking=1000.0)
    made = engine(model, OVERLAPPED)
    made.add(request("a", [*range(CYCLE)] * 2, replace(COPYING, max_tokens=60)))
    delivered = guessed = 0
    while made.step():
        delivered += len(made.take_outputs())
        # Until the last token, the next step is launched by the time that one's tokens are delivered.
        assert delivered == 60 or made._launched is not None
        guessed += made._launched is not None and bool(made._launched.drafts)
    assert guessed > 5


def test_nobody_waits_for_the_guesses_of_one_in_six() -> None:
    made = engine(Copier(liking=1000.0), OVERLAPPED, max_batched_tokens=128)
    others = replace(COPYING, max_tokens=60, logit_bias=dict.fromkeys(range(CYCLE), -2000.0))
    made.add(*(request(str(each), range(CYCLE), others) for each in range(5)))
    made.add(request("copier", range(CYCLE), replace(COPYING, max_tokens=60)))
    assert len(steps_of(made)) <= 60 + 6


@pytest.mark.parametrize("backend", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
def test_what_a_schema_forces_takes_no_steps(backend: Backend) -> None:
    """Of each key, all tokens are known but the last, which may be one with what follows."""
    keys = {"fuelcard": {"type": "integer"}, "strey": {"type": "boolean"}}
    schema = {"properties": keys, "required": [*keys], "additionalProperties": False}
    grammar = GRAMMARS.compile(Grammar("json_schema", json.dumps(schema)))
    text = [*TOKENIZER.encode('{"fuelcard":12, "strey":true}'), END]
    forced = len("fuelcard") + len(("str", "e", "y"))
    taken = {}
    for draft_tokens in (0, 8):
        made = engine(Writer(text), backend, draft_tokens=draft_tokens)
        params = SamplingParams(
            temperature=0.0, max_tokens=60, mask=grammar.mask(), stop_token_ids=frozenset({END})
        )
        made.add(request("a", [0], params))
        stats: list[StepStats] = []
        while made.open_requests:
            step = made.step()
            stats += [step] if step else []
        assert ids(made.take_outputs()) == text
        assert 1 + sum(each.decode_tokens for each in stats) == len(text)
        assert sum(each.right_guesses for each in stats) == len(text) - len(stats)
        taken[draft_tokens] = len(stats)
    assert taken[0] == len(text)
    # With overlap, the first of each key is in flight before it can be guessed.
    assert taken[8] <= len(text) - forced + (2 if backend.overlap else 0)


@pytest.mark.parametrize("backend", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
@pytest.mark.parametrize("failing", ["", "forced", "takes", "fill_ahead"])
def test_a_mask_that_fails_while_it_looks_ahead_costs_guesses_and_no_answer(
    failing: str, backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    text = [each % 11 for each in range(40)]
    made = engine(FakeModel(), backend)
    made.add(request("a", [0], SamplingParams(max_tokens=40, mask=Known(text, failing=failing))))
    steps = 0
    with caplog.at_level("CRITICAL"):
        while made.open_requests:
            steps += made.step() is not None
    outputs = made.take_outputs()
    assert ids(outputs) == text
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert (steps == 40) is bool(failing)


@pytest.mark.parametrize("backend", [PLAIN, OVERLAPPED], ids=["plain", "overlapped"])
@pytest.mark.parametrize("masked", [False, True])
def test_where_nothing_is_guessed_every_step_is_as_without_guesses(backend: Backend, masked: bool) -> None:
    computed = []
    for draft_tokens in (0, 8):
        model = Writer([3 * each % 59 for each in range(59)])  # no token comes twice
        made = engine(model, backend, draft_tokens=draft_tokens)
        grammar = GRAMMARS.compile(Grammar("regex", "(.|\n)*"))
        for number in range(6):
            mask = grammar.mask() if masked else None
            params = SamplingParams(seed=number, max_tokens=40 + number, mask=mask)
            made.add(request(str(number), [number], params))
        run(made)
        computed.append(model.steps)
    assert computed[0] == computed[1]


def test_the_more_sequences_the_less_they_are_looked_at_for_guesses(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []
    expects = Drafter.expects

    def counting(self: Drafter, tokens: Sequence[int], allowance: Allowance, *, flying: bool) -> object:
        looked[-1] += 1
        return expects(self, tokens, allowance, flying=flying)

    monkeypatch.setattr(Drafter, "expects", counting)
    model = Writer([3 * each % 59 for each in range(59)])  # no token comes twice
    made = engine(model, OVERLAPPED, max_running=128, max_batched_tokens=512, kv_blocks=512)
    made._drafts = made._scheduler.drafts = replace(DraftLimits(), rows=256)
    made.add(*(request(str(each), [each % 59], SamplingParams(max_tokens=41)) for each in range(64)))
    while made.open_requests:
        looked.append(0)
        made.step()
    assert sum(looked) > 40 * 16
    assert max(looked[20:]) == 16
    assert sum(looked[20:]) < 64 * 40 / 10


def test_many_that_begin_to_copy_late_are_seen() -> None:
    made = engine(
        Writer([*range(1, 41)] * 3), OVERLAPPED, max_running=128, max_batched_tokens=512, kv_blocks=512
    )
    made.add(*(request(str(each), [0], SamplingParams(max_tokens=119)) for each in range(32)))
    stats = steps_of(made)
    assert not any(each.guessed_tokens for each in stats[:40])
    assert len(stats) < 40 + 80 // 2


def test_what_never_repeats_takes_no_rows_more() -> None:
    model = FakeModel()
    made = engine(model)
    made.add(request("a", range(20), replace(GREEDY, max_tokens=60)))
    run(made)
    extra = sum(len(step) for step in model.steps) - (20 + 59)
    assert extra <= 4  # by accident, three tokens may have stood together before


def test_a_full_step_has_no_guesses() -> None:
    many = DraftLimits().rows
    model = Copier(liking=1000.0)
    made = engine(model, max_running=many, max_batched_tokens=600, kv_blocks=many * 8)
    made.add(*(request(str(each), range(CYCLE), GREEDY) for each in range(many)))
    run(made)
    assert max(len(step) for step in model.steps[1:]) == many


def test_a_request_ends_at_a_stop_among_right_guesses() -> None:
    model = Copier(liking=1000.0)
    made = engine(model)
    stop = SamplingParams(
        temperature=0.0, max_tokens=90, stop_token_ids=frozenset({40}), logit_bias={40: 0.0}
    )
    made.add(request("a", [*range(CYCLE)] * 3, stop))
    for _ in range(3):
        made.step()
    assert made.cancel("a")
    outputs = run(made)["a"]
    assert outputs[-1].finish_reason == "cancelled"
    assert made.stats().kv_blocks_used == 0
    counted = SamplingParams(temperature=0.0, max_tokens=90, stop_token_ids=frozenset({CYCLE - 2}))
    made.add(request("b", [*range(CYCLE)] * 3, counted))
    assert ids(run(made)["b"]) == [*range(CYCLE - 1)]
