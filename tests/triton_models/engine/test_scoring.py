"""Log-probabilities and logits of prompts: each once, in order, as one pass over the prompt has them."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.triton_models.engine import test_logits
from tests.triton_models.engine.fake_model import (
    GREEDY,
    POISON,
    FakeModel,
    continuation,
    ids,
    logits_of,
    request,
    run,
    weight,
)
from triton_models.engine.backend import PLAIN
from triton_models.engine.engine import Engine
from triton_models.engine.models import Operations
from triton_models.engine.scoring import SLICE_ROWS
from triton_models.engine.sequence import FinishReason, Request, TokenLogprobs, TokenOutput
from triton_models.engine.settings import EngineSettings

SMALL = EngineSettings(max_running=4, max_waiting=8, max_batched_tokens=8, block_size=4, kv_blocks=16)


class Observed(FakeModel):
    """Notes of how many rows the logits are computed at a time."""

    def __init__(self, *, max_positions: int = 128) -> None:
        super().__init__(max_positions=max_positions)
        self.heads: list[int] = []

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        self.heads.append(len(hidden))
        return super().logits(hidden, operations)


def asking(name: str, prompt: Sequence[int], top: int = 2, count: int = 8, *, priority: int = 0) -> Request:
    asked = request(name, prompt, replace(GREEDY, max_tokens=count), priority=priority)
    return replace(asked, prompt_logprobs=top)


def told(outputs: list[TokenOutput]) -> list[TokenLogprobs]:
    return [each for output in outputs for each in output.prompt_logprobs]


def check(outputs: list[TokenOutput], prompt: Sequence[int], top: int = 2) -> None:
    """Compare what was told with one pass over the prompt, without an engine."""
    tokens = torch.tensor(prompt)
    states = (tokens.float() * weight(torch.arange(len(prompt)))).cumsum(0)
    raw = logits_of(states[:-1]).log_softmax(dim=-1)
    found = told(outputs)
    assert [each.id for each in found] == list(prompt[1:])
    assert [each.logprob for each in found] == pytest.approx(
        raw.gather(1, tokens[1:, None])[:, 0].tolist(), abs=1e-3
    )
    for each, row in zip(found, raw, strict=True):
        own = row[each.id].item()
        assert 1 + (row > own + 1e-3).sum() <= each.rank <= (row > own - 1e-3).sum()
        assert len(each.top) == top
        assert [value for _, value in each.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-3)
        assert all(value == pytest.approx(row[token].item(), abs=1e-3) for token, value in each.top)


@given(
    st.lists(
        st.tuples(
            st.integers(0, 30),
            st.lists(st.integers(0, 59), min_size=1, max_size=3),
            st.integers(1, 20),
            st.integers(0, 2),
            st.sampled_from([None, "logits"]) | st.integers(0, 20),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(4, 12),
    st.integers(14, 40),
    st.booleans(),
)
def test_each_request_is_told_all_of_its_prompt_and_nothing_else(
    requests: list[tuple[int, list[int], int, int, int | str | None]],
    budget: int,
    blocks: int,
    overlap: bool,
) -> None:
    settings = EngineSettings(max_running=4, max_batched_tokens=budget, block_size=4, kv_blocks=blocks)
    engine = Engine(FakeModel(), settings, backend=replace(PLAIN, overlap=overlap))
    for number, (common, rest, count, priority, wanted) in enumerate(requests):
        asked = asking(str(number), [3] * common + rest, 0, count, priority=priority)
        top = wanted if isinstance(wanted, int) else None
        engine.add(replace(asked, prompt_logprobs=top, logits=wanted == "logits"))
    outputs = run(engine)
    for number, (common, rest, count, _, wanted) in enumerate(requests):
        prompt, own = [3] * common + rest, outputs[str(number)]
        assert ids(own) == continuation(prompt, count)
        tokens_begin = next(place for place, each in enumerate(own) if each.token_id is not None)
        if isinstance(wanted, int):
            check(own, prompt, wanted)
            assert told(own[tokens_begin + 1 :]) == []
        else:
            assert told(own) == []
        if wanted == "logits":
            test_logits.check(own, prompt)
            own = own[tokens_begin + 1 :]
        assert not any(each.prompt_logits for each in own)


KINDS = pytest.mark.parametrize(
    ("asking", "check"), [(asking, check), (test_logits.asking, test_logits.check)], ids=["scores", "logits"]
)


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_tells_nothing_twice_and_loses_nothing(
    asking: Callable[..., Request], check: Callable[..., None], *, overlap: bool
) -> None:
    engine = Engine(FakeModel(), replace(SMALL, kv_blocks=12), backend=replace(PLAIN, overlap=overlap))
    prompts = {str(number): [number + 1] * 9 for number in range(4)}
    for name, prompt in prompts.items():
        engine.add(asking(name, prompt, count=25, priority=-int(name)))
    outputs = run(engine)
    assert engine.stats().preemptions > 0
    for name, prompt in prompts.items():
        check(outputs[name], prompt)
        assert ids(outputs[name]) == continuation(prompt, 25)


@KINDS
@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_that_gives_way_in_its_middle_is_told_no_token_twice(
    asking: Callable[..., Request], check: Callable[..., None], *, overlap: bool
) -> None:
    settings = replace(SMALL, max_batched_tokens=4, kv_blocks=16)
    engine = Engine(FakeModel(), settings, backend=replace(PLAIN, overlap=overlap))
    for number in range(3):
        engine.add(asking(f"urgent {number}", range(3), count=20, priority=-1))
    engine.add(asking("long", range(30), count=1))
    outputs: list[TokenOutput] = []
    while not engine.stats().preemptions:
        engine.step()
        outputs += [each for each in engine.take_outputs() if each.request_id == "long"]
    assert outputs
    assert outputs[-1].finish_reason is None
    outputs += run(engine)["long"]
    check(outputs, range(30))
    assert ids(outputs) == continuation(range(30), 1)


@KINDS
def test_the_prefix_cache_is_not_read_for_it_and_written(
    asking: Callable[..., Request], check: Callable[..., None]
) -> None:
    engine = Engine(FakeModel(), SMALL)
    for name, asked, cached in (
        ("first", asking("first", range(20)), 0),
        ("again", asking("again", range(20)), 0),
        ("plain", request("plain", range(20)), 16),
    ):
        engine.add(asked)
        outputs = run(engine)[name]
        assert {each.cached_tokens for each in outputs} == {cached}
        if name != "plain":
            check(outputs, range(20))


def test_what_is_recomputed_after_all_was_told_may_be_found() -> None:
    """Only the prompt's own pass has to be whole."""
    model = FakeModel()
    engine = Engine(model, replace(SMALL, kv_blocks=11))
    engine.add(asking("victim", range(17), count=20, priority=1))
    engine.step()
    engine.add(asking("urgent", [7] * 9, count=20))
    outputs = run(engine)
    assert engine.stats().preemptions > 0
    check(outputs["victim"], range(17), 2)
    starts = [positions for positions in model.steps if 0 in positions]
    assert len(starts) == 2, "the victim's first blocks were still there"


class Alike(FakeModel):
    """Finds the tokens from 8 on equally likely, and those below less so, one as the other."""

    def logits(self, hidden: Tensor, operations: Operations) -> Tensor:
        found = super().logits(hidden, operations)
        return (torch.arange(found.shape[1]) >= 8).float().expand_as(found).contiguous()


@pytest.mark.parametrize("top", [0, 3, 20])
def test_no_two_of_a_report_share_a_rank(top: int) -> None:
    engine = Engine(Alike(), SMALL)
    engine.add(asking("a", range(30), top, count=1))
    found = told(run(engine)["a"])
    vocabulary = len(logits_of(torch.zeros(1))[0])
    for each in found:
        places = {token: place for place, (token, _) in enumerate(each.top, start=1)}
        below = vocabulary if each.id < 8 else vocabulary - 8
        assert each.rank == places.get(each.id, below)
    assert len(found) == 29


def test_a_prompt_of_one_token_has_none() -> None:
    engine = Engine(FakeModel(), SMALL)
    engine.add(asking("a", [5]))
    assert told(run(engine)["a"]) == []


def test_a_cancel_in_the_middle_of_the_prompt_ends_it() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL, backend=replace(PLAIN, overlap=True))
    engine.add(asking("a", range(40)))
    engine.step()
    engine.cancel("a")
    outputs = run(engine)["a"]
    assert outputs[-1].finish_reason is FinishReason.CANCELLED
    assert 0 < len(told(outputs)) < 39
    assert not outputs[-1].prompt_logprobs
    assert engine.stats().kv_blocks_used == 0


def test_who_did_not_run_in_a_failed_step_goes_on_where_it_was() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL)
    engine.add(asking("long", range(20)))
    engine.step()
    outputs = engine.take_outputs()
    assert len(told(outputs)) == 8
    engine.add(asking("urgent", range(8), priority=-1))
    model.faults = 1
    with pytest.raises(RuntimeError, match="device is gone"):
        engine.step()
    engine.fail_running("the step failed")
    assert [each.request_id for each in engine.take_outputs()] == ["urgent"]
    check(outputs + run(engine)["long"], range(20), 2)


def test_a_prompt_whose_rows_are_not_finite_ends_where_they_are_seen() -> None:
    model = FakeModel()
    engine = Engine(model, SMALL)
    engine.add(asking("a", [1, 2, POISON, *range(30)]))
    outputs = run(engine)["a"]
    assert [each.error for each in outputs] == ["the model's output is not finite"]
    assert len(model.steps) == 1
    engine.add(request("b", [1, 2, POISON, *range(30)]))
    assert run(engine)["b"][0].cached_tokens == 0


def test_the_head_sees_slices_of_one_size_and_no_row_more_for_who_did_not_ask() -> None:
    settings = EngineSettings(max_running=4, max_batched_tokens=120, block_size=4, kv_blocks=80)
    model = Observed(max_positions=256)
    engine = Engine(model, settings)
    engine.add(request("plain", [1] * 150, replace(GREEDY, max_tokens=3)))
    run(engine)
    assert model.heads == [1, 1, 1]
    model.heads.clear()
    engine.add(asking("asks", [2] * 150, count=3))
    engine.add(request("plain", [4] * 150, replace(GREEDY, max_tokens=3)))
    run(engine)
    scored = [rows for rows in model.heads if rows > 2]
    assert scored == [SLICE_ROWS] * 3
    assert sum(model.heads) - sum(scored) == 2 * 3
