import random
import threading
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine.fake_model import GREEDY, FakeModel, continuation, ids, request, run
from triton_models.engine.backend import PLAIN
from triton_models.engine.drafts import DraftLimits
from triton_models.engine.engine import Engine, Intake
from triton_models.engine.models import Operations
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Sequence, TokenOutput
from triton_models.engine.settings import EngineSettings
from triton_models.errors import (
    EngineStoppedError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 59), min_size=1, max_size=30), st.integers(1, 20), st.integers(0, 2)
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(4, 12),
    st.integers(13, 40),
)
def test_every_request_gets_what_it_gets_alone(
    requests: list[tuple[list[int], int, int]], budget: int, blocks: int
) -> None:
    settings = EngineSettings(max_running=4, max_batched_tokens=budget, block_size=4, kv_blocks=blocks)
    engine = Engine(FakeModel(), settings)
    for number, (prompt, count, priority) in enumerate(requests):
        engine.add(request(str(number), prompt, replace(GREEDY, max_tokens=count), priority=priority))
    outputs = run(engine)
    for number, (prompt, count, _) in enumerate(requests):
        assert ids(outputs[str(number)]) == continuation(prompt, count)
        ends = [each.finish_reason for each in outputs[str(number)]]
        assert ends == [None] * (count - 1) + [FinishReason.LENGTH]
    assert engine.stats().kv_blocks_used == 0


def test_preemption_changes_no_answer_and_no_random_number() -> None:
    sampling = SamplingParams(temperature=1.0, max_tokens=30, seed=5, logprobs=2)
    roomy = Engine(FakeModel(), EngineSettings(block_size=4))
    tight = Engine(FakeModel(), replace(SMALL, kv_blocks=12))
    for engine in (roomy, tight):
        for number in range(4):
            engine.add(request(str(number), [number + 1] * 5, replace(sampling, seed=number)))
    expected, outputs = run(roomy), run(tight)
    assert roomy.stats().preemptions == 0
    assert tight.stats().preemptions > 0
    for key, wanted in expected.items():
        assert ids(outputs[key]) == ids(wanted)
        assert [each.logprobs for each in outputs[key]] == [each.logprobs for each in wanted]


def test_a_step_mixes_decodes_and_prompt_chunks_within_its_budget() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL)
    engine.add(request("short", [1, 2]))
    engine.step()
    engine.add(request("long", range(20)))
    run(engine)
    # The decode of the short one goes first in every step; the long prompt fills what is left.
    assert model.steps[:4] == [[0, 1], [2, *range(7)], [3, *range(7, 14)], [4, *range(14, 20)]]


class Monotone(FakeModel):
    """Says one word."""

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        logits = super().logits(hidden, operations)
        logits[:, 5] = 1000.0
        return logits


def test_guesses_leave_room_for_prompts() -> None:
    free = replace(PLAIN, drafts=DraftLimits(step_s=1.0, row_s=1e-9))
    engine = Engine(Monotone(), replace(SMALL, kv_blocks=64), backend=free)
    engine.add(*(request(name, (1, 2), SamplingParams(temperature=0.0, max_tokens=99)) for name in "ab"))
    for _ in range(9):
        stats = engine.step()
    assert stats is not None
    assert stats.guessed_tokens
    engine.add(request("late"))
    engine.step()
    assert "late" in {each.request_id for each in engine.take_outputs()}


def test_the_timing_facts_are_at_the_first_token_only() -> None:
    clock = Clock()
    engine = Engine(FakeModel(), replace(SMALL, max_running=1), clock=clock)
    engine.add(request("a", sampling=replace(GREEDY, max_tokens=2)))
    engine.add(request("b"))
    clock.now += 2
    outputs = run(engine)
    first, second = outputs["a"]
    assert (first.queue_seconds, first.time_to_first_token, first.prompt_tokens) == (2, 2, 3)
    assert (second.queue_seconds, second.time_to_first_token) == (None, None)


def test_a_stop_id_ends_the_answer_and_is_part_of_it() -> None:
    answer = continuation([1, 2, 3], 8)
    stop = answer[4]
    place = answer.index(stop)
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("a", sampling=replace(GREEDY, stop_token_ids=frozenset({stop}))))
    outputs = run(engine)["a"]
    assert ids(outputs) == answer[: place + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_min_tokens_holds_stop_ids_back_and_no_longer() -> None:
    engine = Engine(FakeModel(), SMALL)
    params = replace(GREEDY, stop_token_ids=frozenset({7}), min_tokens=3, logit_bias={7: 100.0})
    engine.add(request("a", sampling=params))
    answer = ids(run(engine)["a"])
    assert 7 not in answer[:3]
    assert answer[3:] == [7]


def test_without_max_tokens_the_answer_fills_the_context() -> None:
    engine = Engine(FakeModel(max_positions=20), SMALL)
    engine.add(request("a", sampling=replace(GREEDY, max_tokens=None)))
    assert len(ids(run(engine)["a"])) == 17


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "words"),
    [
        ([], GREEDY, InvalidRequestError, "no tokens"),
        ([61], GREEDY, InvalidRequestError, "prompt has an id outside the vocabulary of 61"),
        ([-1], GREEDY, InvalidRequestError, "outside the vocabulary"),
        ([1], replace(GREEDY, logit_bias={61: 1.0}), InvalidRequestError, "logit_bias"),
        ([1], replace(GREEDY, stop_token_ids=frozenset({99})), InvalidRequestError, "stop_token_ids"),
        (
            [1] * 64,
            replace(GREEDY, max_tokens=None),
            PromptTooLongError,
            "is 64 tokens. However, the prompt has 64 tokens",
        ),
        (
            [1] * 60,
            replace(GREEDY, max_tokens=5),
            PromptTooLongError,
            "is 64 tokens. However, you requested 65",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_at_once(
    prompt: list[int], sampling: SamplingParams, error: type[ModelError], words: str
) -> None:
    engine = Engine(FakeModel(), SMALL)  # 16 blocks of 4 hold 64 of the model's 128 positions.
    assert engine.max_context == 64
    with pytest.raises(error, match=words):
        engine.add(request("a", prompt, sampling))
    assert engine.open_requests == 0


def test_the_number_of_open_requests_is_bounded() -> None:
    engine = Engine(FakeModel(), SMALL)
    for number in range(12):
        engine.add(request(str(number)))
    with pytest.raises(QueueFullError, match="12 requests"):
        engine.add(request("more"))
    assert engine.stats().waiting == 12
    run(engine)
    engine.add(request("3"))


def test_cancel_frees_a_waiting_a_prefilling_and_a_decoding_request() -> None:
    engine = Engine(FakeModel(), replace(SMALL, max_running=2))
    engine.add(request("decoding", [1, 2, 3]))
    engine.step()
    engine.add(request("prefilling", [5] * 30))
    engine.add(request("waiting"))
    engine.step()
    engine.take_outputs()
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (2, 1, 9)
    for name in ("decoding", "prefilling", "waiting"):
        assert engine.cancel(name)
    assert engine.step() is None
    outputs = engine.take_outputs()
    assert {(each.request_id, each.finish_reason) for each in outputs} == {
        (name, FinishReason.CANCELLED) for name in ("decoding", "prefilling", "waiting")
    }
    assert (engine.stats().running, engine.stats().waiting, engine.stats().kv_blocks_used) == (0, 0, 0)
    assert not engine.cancel("decoding")


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    clock = Clock()
    model = FakeModel()
    engine = Engine(model, replace(SMALL, max_running=1), clock=clock)
    engine.add(request("running", deadline=105.0))
    engine.add(request("waiting", [9, 9], deadline=104.0))
    engine.add(request("patient", deadline=1000.0))
    engine.step()
    clock.now = 104.5
    engine.step()
    clock.now = 105.0
    outputs = run(engine)
    assert [each.finish_reason for each in outputs["waiting"]] == [FinishReason.DEADLINE]
    assert outputs["waiting"][0].token_id is None
    assert outputs["running"][-1].finish_reason is FinishReason.DEADLINE
    assert len(ids(outputs["running"])) == 2
    assert outputs["patient"][-1].finish_reason is FinishReason.LENGTH


def test_lower_priority_numbers_run_first() -> None:
    engine = Engine(FakeModel(), replace(SMALL, max_running=1))
    for name, priority in (("late", 5), ("first", -1), ("middle", 0), ("middle2", 0)):
        engine.add(request(name, priority=priority))
    ends = [output.request_id for output in _finals(engine)]
    assert ends == ["first", "middle", "middle2", "late"]


def _finals(engine: Engine) -> list[TokenOutput]:
    finals = []
    while engine.open_requests:
        engine.step()
        finals += [each for each in engine.take_outputs() if each.finish_reason]
    return finals


def test_an_important_prompt_overtakes_one_under_way() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL)
    engine.add(request("long", [1] * 30))
    engine.step()
    engine.add(request("equal", [2] * 3))
    engine.step()
    engine.add(request("important", [3] * 3, priority=-1))
    engine.step()
    assert model.steps == [[*range(8)], [*range(8, 16)], [0, 1, 2, *range(16, 21)]]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    engine = Engine(FakeModel(), SMALL)
    numbers = random.Random(0)
    engine.add(request("filler", [1] * 20))
    engine.step()
    engine.add(request("large", [2] * 50))
    finished = []
    for number in range(200):
        if engine.open_requests < 8:
            engine.add(request(f"small{number}", [numbers.randrange(60)] * 3))
        engine.step()
        finished += [each.request_id for each in engine.take_outputs() if each.finish_reason]
    assert "large" in finished
    assert finished.index("large") < 20


def test_the_statistics_of_a_step() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(request("a", [1, 2, 3]))
    engine.add(request("b", [1] * 10))
    first, second = engine.step(), engine.step()
    assert first is not None
    assert second is not None
    assert (first.batch_size, first.prefill_tokens, first.decode_tokens) == (2, 8, 0)
    assert (second.batch_size, second.prefill_tokens, second.decode_tokens) == (2, 5, 1)
    assert first.seconds > 0


def sequence(name: str) -> Sequence:
    return Sequence(request(name), arrival=0, arrived_at=0.0, max_tokens=8)


def test_requests_and_cancels_are_collected_once_and_in_order() -> None:
    intake = Intake(4)
    first, second = sequence("a"), sequence("b")
    intake.add([first])
    intake.add([second])
    assert intake.cancel("b")
    assert not intake.cancel("unknown")
    assert intake.collect() == ([first, second], [second])
    assert intake.collect() == ([], [])
    assert intake.open == 2
    third = sequence("c")
    intake.add([third])
    assert intake.collect_all() == [first, second, third]
    assert intake.collect() == ([], [])


def test_an_id_is_known_until_its_request_ends() -> None:
    intake = Intake(4)
    intake.add([sequence("a")])
    intake.end("a")
    assert not intake.cancel("a")
    intake.add([sequence("a")])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_late_cancel_does_not_meet_the_next_request_of_its_id(
    monkeypatch: pytest.MonkeyPatch, *, overlap: bool
) -> None:
    engine = Engine(FakeModel(), SMALL, backend=replace(PLAIN, overlap=overlap))
    engine.add(request("a", (1, 2), replace(GREEDY, max_tokens=1)))
    late: list[bool] = []
    collect = engine._collect

    def collect_late(step: Any) -> Any:
        late.append(engine.cancel("a"))
        return collect(step)

    with monkeypatch.context() as patched:
        patched.setattr(engine, "_collect", collect_late)
        assert ids(run(engine)["a"]) == continuation((1, 2), 1)
    assert late == [True]
    engine.add(request("a", (3, 4)))
    assert ids(run(engine)["a"]) == continuation((3, 4), 8)


def test_requests_that_come_together_are_taken_together_or_not_at_all() -> None:
    intake = Intake(4)
    intake.add([sequence("a"), sequence("b")])
    with pytest.raises(QueueFullError):
        intake.add([sequence(name) for name in "cde"])
    with pytest.raises(InvalidRequestError, match="5 requests"):
        intake.add([sequence(name) for name in "cdefg"])
    assert intake.open == 2
    intake.add([sequence("c"), sequence("d")])
    assert [each.request.request_id for each in intake.collect()[0]] == list("abcd")


def test_the_limit_holds_under_many_threads() -> None:
    intake = Intake(10)
    refused: list[str] = []
    start = threading.Barrier(40)

    def add(name: str) -> None:
        start.wait()
        try:
            intake.add([sequence(name)])
        except QueueFullError:
            refused.append(name)

    threads = [threading.Thread(target=add, args=(str(number),)) for number in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 30
    assert len(intake.collect()[0]) == intake.open == 10


def test_a_closed_intake_still_gives_what_it_took() -> None:
    intake = Intake(4)
    intake.add([sequence("a")])
    intake.close()
    with pytest.raises(EngineStoppedError):
        intake.add([sequence("b")])
    assert [each.request.request_id for each in intake.collect()[0]] == ["a"]
