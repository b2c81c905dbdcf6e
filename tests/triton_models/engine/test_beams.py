"""Beam searches: the answers are transformers', their KV blocks are shared, and they end like any request."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.triton_models.engine.fake_model import GREEDY, FakeModel, continuation, request
from tests.triton_models.engine.test_prefix import CountedKeys
from tests.triton_models.native_checkpoint import write_native
from triton_models.checkpoint import load_model
from triton_models.engine.backend import PLAIN
from triton_models.engine.beams import BeamParams, BeamRequest, BeamSearch, BeamSearches, EarlyStopping
from triton_models.engine.engine import Engine
from triton_models.engine.models import CausalModel
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Request, TokenLogprobs, TokenOutput
from triton_models.engine.settings import EngineSettings
from triton_models.errors import (
    EngineStoppedError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
)

SETTINGS = EngineSettings(max_running=8, max_waiting=8, max_batched_tokens=64, block_size=4, kv_blocks=200)
PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9)
STOP = frozenset({7, 30, 45})
FAMILIES = ("bloom", "glm", "llama")


def search(
    name: str = "s",
    prompt: Sequence[int] = PROMPT,
    width: int = 4,
    *,
    answers: int | None = None,
    max_tokens: int | None = 12,
    stop: frozenset[int] = STOP,
    logprobs: int | None = None,
    length_penalty: float = 1.0,
    early_stopping: EarlyStopping = False,
    deadline: float | None = None,
    priority: int = 0,
) -> BeamRequest:
    sampling = SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, logprobs=logprobs)
    return BeamRequest(
        request=Request(
            request_id=f"{name}.0",
            prompt_ids=tuple(prompt),
            sampling=sampling,
            deadline=deadline,
            priority=priority,
        ),
        params=BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping),
        answers=tuple(f"{name}.{rank}" for rank in range(answers or width)),
    )


class Runner:
    """An engine with its searches, step by step."""

    def __init__(self, model: CausalModel | None = None, *, overlap: bool = False, **changes: Any) -> None:
        backend = replace(PLAIN, overlap=overlap)
        self.engine = Engine(model or FakeModel(), replace(SETTINGS, **changes), backend=backend)
        self.searches = BeamSearches(self.engine)
        self.outputs: dict[str, list[TokenOutput]] = {}
        self.order: list[str] = []
        """Of the ends."""
        self.prefills: list[int] = []
        self.batches: list[int] = []

    def add(self, *requests: Request | BeamRequest) -> None:
        self.searches.add(*requests)

    def step(self) -> None:
        stats = self.engine.step()
        if stats is not None:
            self.prefills.append(stats.prefill_tokens)
            self.batches.append(stats.batch_size)
        for output in self.searches.take_outputs():
            self.outputs.setdefault(output.request_id, []).append(output)
            if output.finish_reason is not None:
                self.order.append(output.request_id)

    def run(self) -> "Runner":
        for _ in range(3000):
            self.step()
            if not self.engine.open_requests:
                assert self.engine.stats().kv_blocks_used == 0
                assert not self.searches._members
                assert not self.searches._answers
                return self
        raise AssertionError("requests stay open")

    def ids(self, name: str) -> list[int | None]:
        return [each.token_id for each in self.outputs[name]]

    def answers(self, name: str = "s") -> list[list[int | None]]:
        names = sorted(each for each in self.outputs if each.startswith(f"{name}."))
        return [self.ids(each) for each in names]

    def ends(self) -> dict[str, FinishReason | None]:
        return {name: outputs[-1].finish_reason for name, outputs in self.outputs.items()}


def alone(asked: BeamRequest) -> list[list[int | None]]:
    runner = Runner()
    runner.add(asked)
    return runner.run().answers()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[PreTrainedModel, CausalModel]]:
    folder = tmp_path_factory.mktemp("checkpoints")

    def both(family: str) -> tuple[PreTrainedModel, CausalModel]:
        place = folder / family
        reference = write_native(place, family)
        return reference, load_model(place, torch.float32, torch.device("cpu"))

    return {family: both(family) for family in FAMILIES}


def generate(reference: PreTrainedModel, prompt: list[int], asked: BeamParams, **options: Any) -> Any:
    """Transformers' own beam search."""
    with torch.inference_mode():
        return reference.generate(
            torch.tensor([prompt]),
            num_beams=asked.width,
            length_penalty=asked.length_penalty,
            early_stopping=asked.early_stopping,
            max_new_tokens=14,
            pad_token_id=0,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
            **options,
        )


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize(
    ("width", "answers", "length_penalty", "stops"),
    [
        (2, 2, 0.0, 3),
        (2, 1, 1.0, 1),
        (4, 4, 0.0, 3),
        (4, 3, 2.0, 2),
        (8, 8, -1.0, 1),
        (8, 5, 0.6, 2),
        (3, 3, 1.0, 0),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_and_scores_are_transformers(  # noqa: PLR0917 - pytest passes them by name
    checkpoints: dict[str, tuple[PreTrainedModel, CausalModel]],
    family: str,
    width: int,
    answers: int,
    length_penalty: float,
    stops: int,
    early_stopping: EarlyStopping,
) -> None:
    reference, model = checkpoints[family]
    prompt = torch.randint(3, 320, (11,), generator=torch.Generator().manual_seed(width)).tolist()
    params = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    # The ids that stop are those that would stand within the best answers, so that some beams end at them.
    endless = generate(reference, prompt, params, eos_token_id=None).sequences[0, len(prompt) :].tolist()
    stop = sorted({endless[5 + 2 * number] for number in range(stops)})
    expected = generate(reference, prompt, params, eos_token_id=stop or None, num_return_sequences=answers)
    runner = Runner(model)
    request = search(
        prompt=prompt, width=width, answers=answers, max_tokens=14, stop=frozenset(stop), logprobs=0
    )
    runner.add(replace(request, params=params))
    found = runner.run().answers()
    for mine, theirs in zip(found, expected.sequences[:, len(prompt) :].tolist(), strict=True):
        assert mine == theirs[: len(mine)]
        assert len(mine) == 14 or mine[-1] in stop
    scores = [
        sum(each.logprobs.logprob for each in outputs if each.logprobs) / len(outputs) ** length_penalty
        for _, outputs in sorted(runner.outputs.items())
    ]
    assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4, rel=1e-6)
    if stops and answers == width:
        assert any(len(each) < 14 for each in found), "no stop id was reached"


def reports(*tops: dict[int, float]) -> list[TokenLogprobs]:
    return [TokenLogprobs(id=0, logprob=0.0, top=tuple(top.items())) for top in tops]


def test_an_answer_that_is_not_among_the_best_candidates_is_none() -> None:
    found = BeamSearch(BeamParams(width=2), stop_ids={9}, max_tokens=5)
    found.advance(reports({1: -0.1, 2: -0.2, 9: -0.3}))
    assert ([beam.tokens for beam in found.beams], found.answers) == ([(1,), (2,)], [])
    found.advance(reports({9: -0.1, 3: -0.5, 4: -9.0}, {9: -0.2, 5: -0.3, 6: -9.0}))
    assert [beam.tokens for beam in found.beams] == [(2, 5), (1, 3)]
    assert [answer.beam.tokens for answer in found.answers] == [(1, 9), (2, 9)]
    assert found.answers[0].score == pytest.approx(-0.1)


@pytest.mark.parametrize(("early_stopping", "over"), [(True, True), (False, True), ("never", False)])
def test_when_it_is_over(early_stopping: EarlyStopping, over: bool) -> None:
    """Both answers are there, and the best beam is worse, but at its full length would be better."""
    params = BeamParams(width=2, early_stopping=early_stopping)
    found = BeamSearch(params, stop_ids={8, 9}, max_tokens=50)
    found.advance(reports({8: -1.0, 9: -1.1, 1: -2.0, 2: -2.1}))
    assert found.over is over


def test_it_goes_on_while_a_beam_is_better_than_the_worst_answer() -> None:
    found = BeamSearch(BeamParams(width=2), stop_ids={8, 9}, max_tokens=50)
    found.advance(reports({1: -0.1, 9: -0.2, 2: -3.0, 8: -4.0}))
    found.advance(reports({3: -0.1, 8: -5.0}, {9: -2.0, 4: -2.5}))
    assert not found.over
    assert [answer.beam.tokens for answer in found.answers] == [(9,), (2, 9)]


def test_a_step_computes_one_token_for_each_beam() -> None:
    runner = Runner(max_batched_tokens=200)
    prompt = [number % 50 for number in range(99)]
    runner.add(search(prompt=prompt, width=8, stop=frozenset()))
    runner.run()
    assert runner.batches == [1] + [8] * 11
    assert runner.prefills == [99] + [8] * 11


def test_the_prompt_of_another_request_is_found() -> None:
    runner = Runner()
    runner.add(request("r", PROMPT))
    runner.run()
    runner.add(search())
    runner.run()
    assert {each.cached_tokens for each in runner.outputs["s.0"]} == {12}
    assert runner.answers() == alone(search())


def test_beams_hold_the_same_blocks() -> None:
    runner = Runner(max_batched_tokens=200)
    runner.add(search(prompt=[7] * 80, width=8, stop=frozenset()))
    used = []
    for _ in range(6):
        runner.engine._launched = runner.engine._launch()
        used.append(runner.engine.stats().kv_blocks_used)
        runner.step()
    # Those of the prompt, and each beam's copy of the last.
    assert max(used) <= 20 + 2 * 8


def test_the_prompt_is_not_looked_up_for_each_beam() -> None:
    runner = Runner(max_batched_tokens=200)
    runner.add(search(prompt=[7] * 80, width=8, stop=frozenset()))
    runner.step()
    prefixes: Any = runner.engine._scheduler._prefixes
    prefixes._key = counted = CountedKeys(prefixes._key)
    runner.run()
    assert counted.packed <= 11 * 8 * 4, "in each step, what was generated of each beam"


def test_what_is_evicted_is_computed_once_for_all_beams() -> None:
    runner = Runner(max_batched_tokens=200)
    prompt = [number % 50 for number in range(60)]
    runner.add(search(prompt=prompt, width=4, stop=frozenset()))
    for _ in range(4):
        runner.step()
    blocks = runner.engine._blocks
    taken = blocks.allocate(blocks.available)  # evicts all that nobody holds
    blocks.release(taken)
    runner.step()
    assert 63 <= runner.prefills[-1] <= 63 + 3 * 8
    runner.run()
    assert runner.answers() == alone(search(prompt=prompt, stop=frozenset()))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("blocks", "budget"), [(200, 64), (11, 9)])
def test_amid_others_all_get_what_they_get_alone(overlap: bool, blocks: int, budget: int) -> None:
    """Also where others take the blocks, and a step has not room for all beams."""
    runner = Runner(overlap=overlap, kv_blocks=blocks, max_batched_tokens=budget)
    others = {f"r{number}": [number, *PROMPT[:number]] for number in range(5)}
    for name, prompt in list(others.items())[:3]:
        runner.add(request(name, prompt, replace(GREEDY, max_tokens=25)))
    runner.add(search("s"))
    runner.add(search("t", PROMPT[2:], 3, length_penalty=2.0, early_stopping="never"))
    for name, prompt in list(others.items())[3:]:
        runner.add(request(name, prompt, replace(GREEDY, max_tokens=25)))
    runner.run()
    assert (runner.engine.stats().preemptions > 0) == (blocks == 11)
    for name, prompt in others.items():
        assert runner.ids(name) == continuation(prompt, 25)
    assert runner.answers("s") == alone(search())
    other = search("s", PROMPT[2:], 3, length_penalty=2.0, early_stopping="never")
    assert runner.answers("t") == alone(other)


def test_it_keeps_its_place_before_those_that_came_later() -> None:
    runner = Runner(max_running=2)
    runner.add(search(width=2, max_tokens=6, stop=frozenset()))
    for number in range(4):
        runner.add(request(f"r{number}"))
    # The first takes the slot that the search, of one beam at first, leaves free.
    assert set(runner.run().order[:3]) == {"r0", "s.0", "s.1"}


def test_it_goes_on_while_the_queue_is_full() -> None:
    runner = Runner(max_running=2, max_waiting=1)
    runner.add(search(width=8))
    runner.step()
    # Between its steps it holds no place for all of its beams.
    for number in range(5):
        try:
            runner.add(request(f"r{number}"))
        except QueueFullError:
            break
        runner.step()
    else:
        raise AssertionError("the queue was never full")
    with pytest.raises(QueueFullError):
        runner.add(search("t"))
    runner.run()
    assert runner.answers() == alone(search(width=8))


def test_what_can_never_be_is_refused() -> None:
    runner = Runner(FakeModel(max_positions=32))
    with pytest.raises(PromptTooLongError):
        runner.add(search(max_tokens=18))
    with pytest.raises(InvalidRequestError, match="62 beams"):
        runner.add(search(width=62))
    with pytest.raises(InvalidRequestError, match="stop_token_ids"):
        runner.add(search(stop=frozenset({61})))
    runner.add(search(max_tokens=None, stop=frozenset()))
    assert [len(each) for each in runner.run().answers()] == [17] * 4


def test_each_token_is_reported_with_as_many_alternatives_as_were_asked_for() -> None:
    runner = Runner()
    runner.add(search("s", logprobs=2), search("t"), search("u", width=2, logprobs=20))
    runner.run()
    for outputs in (runner.outputs[name] for name in ("s.0", "s.3")):
        told = [each.logprobs for each in outputs if each.logprobs is not None]
        assert [each.id for each in told] == [each.token_id for each in outputs]
        assert {len(each.top) for each in told} == {2}
        assert all(dict(each.top).get(each.id, each.logprob) == each.logprob for each in told)
    assert all(each.logprobs is None for each in runner.outputs["t.0"])
    assert {len(each.logprobs.top) for each in runner.outputs["u.0"] if each.logprobs} == {20}


def test_answers_are_told_like_any_requests() -> None:
    runner = Runner()
    runner.add(replace(search(), answers=("a", None, "c")))
    runner.run()
    expected = alone(search())
    assert set(runner.outputs) == {"a", "c"}
    for name, ids in (("a", expected[0]), ("c", expected[2])):
        first, *rest = runner.outputs[name]
        assert runner.ids(name) == ids
        assert (first.queue_seconds is not None, first.time_to_first_token is not None) == (True, True)
        assert all(each.queue_seconds is each.time_to_first_token is None for each in rest)
        reasons = [each.finish_reason for each in runner.outputs[name]]
        end = FinishReason.STOP if ids[-1] in STOP else FinishReason.LENGTH
        assert reasons == [None] * (len(ids) - 1) + [end]
        assert {each.prompt_tokens for each in runner.outputs[name]} == {len(PROMPT)}


def test_one_beam_is_greedy() -> None:
    assert alone(search(width=1, stop=frozenset())) == [continuation(PROMPT, 12)]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("steps", range(4))
def test_a_cancel_ends_all_of_it(steps: int, overlap: bool) -> None:
    runner = Runner(overlap=overlap)
    runner.add(search(max_tokens=100, stop=frozenset()), request("r"))
    for _ in range(steps):
        runner.step()
    assert runner.searches.cancel("s.2")
    runner.run()
    ended = dict.fromkeys((f"s.{rank}" for rank in range(4)), FinishReason.CANCELLED)
    assert runner.ends() == {**ended, "r": FinishReason.LENGTH}
    assert not runner.searches.cancel("s.2")
    assert sum(runner.batches) < 40


def end_by_deadline(runner: Runner) -> None:
    runner.engine.clock = lambda: 1e9


def end_by_a_fault(runner: Runner) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("the device is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.engine._runner, "begin", fail)
        with pytest.raises(RuntimeError):
            runner.engine.step()
    runner.engine.fail_running("it failed")


def end_by_shutdown(runner: Runner) -> None:
    runner.engine.shut_down(FinishReason.SHUTDOWN, "it stops")


@pytest.mark.parametrize(
    ("end", "reason", "error"),
    [
        (end_by_deadline, FinishReason.DEADLINE, None),
        (end_by_a_fault, FinishReason.FAULT, "it failed"),
        (end_by_shutdown, FinishReason.SHUTDOWN, "it stops"),
    ],
)
def test_what_ends_a_beam_ends_all_of_it(
    end: Callable[[Runner], None], reason: FinishReason, error: str | None
) -> None:
    runner = Runner()
    runner.add(search(max_tokens=50, stop=frozenset(), deadline=1e8))
    for _ in range(3):
        runner.step()
    end(runner)
    runner.run()
    ended = [(output.finish_reason, output.error) for (output,) in runner.outputs.values()]
    assert ended == [(reason, error)] * 4
    if reason is not FinishReason.SHUTDOWN:
        runner.outputs.clear()
        runner.engine.clock = lambda: 0.0
        runner.add(search())
        assert runner.run().answers() == alone(search())


def test_an_engine_that_stops_between_two_steps_ends_it() -> None:
    runner = Runner()
    runner.add(search(max_tokens=50))
    runner.step()
    runner.engine.step()
    runner.engine.shut_down(FinishReason.FAULT, "it has stopped")
    runner.run()
    assert runner.ends() == dict.fromkeys((f"s.{rank}" for rank in range(4)), FinishReason.SHUTDOWN)
    with pytest.raises(EngineStoppedError):
        runner.add(search("t"))
    assert not runner.searches._answers


def test_a_search_that_fails_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner()
    runner.add(search("s"), search("t"), request("r"))
    runner.step()
    monkeypatch.setattr(runner.searches._answers["s.0"].search, "advance", None)
    runner.run()
    assert {runner.ends()[f"s.{rank}"] for rank in range(4)} == {FinishReason.ERROR}
    assert runner.answers("t") == alone(search())
    assert runner.ids("r") == continuation((1, 2, 3), 8)
