"""Answers that are held to a grammar, from the request to its responses."""

import json
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pytest

from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import wait_until
from triton_models.errors import TokenMaskError
from triton_models.serving import intake
from triton_models.serving.intake import COMPILERS
from triton_models.text.grammars import CompiledGrammar, GrammarMask, Grammars
from wire.grammar import Grammar
from wire.refusal import RefusalCode
from wire.request import Cancel, encode_request

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "你"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
BY_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA))
BY_REGEX = Grammar("regex", "[a-z]{3}[0-9]{2}")


@pytest.mark.parametrize("seed", range(8))
def test_every_answer_validates_at_the_highest_temperature(served: Served, seed: int) -> None:
    streamed = served.ask(grammar=BY_SCHEMA, temperature=2, seed=seed, max_tokens=60, streamed=True).wait()
    whole = served.ask(grammar=BY_SCHEMA, temperature=2, seed=seed, max_tokens=60).wait()
    assert streamed.text == whole.text
    assert whole.metas[-1].finish_reason == streamed.metas[-1].finish_reason
    if whole.metas[-1].finish_reason == "stop":
        jsonschema.validate(json.loads(whole.text), SCHEMA)
    else:
        assert whole.metas[-1].usage.completion_tokens == 60


def test_each_choice_is_held_to_it_by_itself(served: Served) -> None:
    answer = served.ask(grammar=BY_REGEX, temperature=2, seed=5, n=4).wait()
    texts = ["".join(text for text, meta in answer.responses if meta.index == index) for index in range(4)]
    assert all(re.fullmatch("[a-z]{3}[0-9]{2}", text) for text in texts)
    assert len(set(texts)) == 4


def test_free_requests_beside_it_are_free_and_preemption_loses_nothing(
    serve: Callable[..., Served],
) -> None:
    ample, scarce = serve(), serve(kv_blocks=8, block_size=4, max_context=28, max_running=4)
    asked = [{"temperature": 2, "seed": seed, "max_tokens": 14} for seed in range(6)]
    for kind in (None, BY_REGEX, Grammar("regex", "[a-z]{30}")):
        expected = [ample.ask(grammar=kind, **each).wait().text for each in asked]
        answers = [scarce.ask(grammar=kind, **each) for each in asked]
        assert [answer.wait().text for answer in answers] == expected
    assert scarce.service._loop.stats().preemptions


def test_raw_text_is_continued_by_it(served: Served) -> None:
    answer = served.ask("x = ", raw=True, grammar=BY_REGEX, temperature=2).wait()
    assert re.fullmatch("[a-z]{3}[0-9]{2}", answer.text)
    for raw in (False, True):
        ids = served.ask("", prompt_token_ids=[5, 6], raw=raw, grammar=BY_REGEX, temperature=2).wait()
        assert re.fullmatch("[a-z]{3}[0-9]{2}", ids.text)


@pytest.mark.parametrize(
    ("grammar", "more", "why"),
    [
        (Grammar("json_schema", '{"not": {}}'), {}, "not"),
        (Grammar("regex", "("), {}, "regex"),
        (BY_REGEX, {"min_tokens": 1}, "min_tokens"),
        (BY_REGEX, {"ignore_eos": True}, "ignore_eos"),
        (Grammar("tool_calls", "{}"), {}, "."),
    ],
)
def test_what_cannot_be_enforced_is_refused(
    served: Served, grammar: Grammar, more: dict[str, object], why: str
) -> None:
    refused = served.ask(grammar=grammar, **more).wait()
    code, message = refused.refused
    assert code is RefusalCode.INVALID_GRAMMAR
    assert re.search(why, message)


def test_who_waits_for_a_compiler_can_leave_and_the_queue_is_bounded(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    compile_ = Grammars.compile

    def slow(self: Grammars, *arguments: Any, **options: Any) -> CompiledGrammar:
        assert go.wait(20)
        return compile_(self, *arguments, **options)

    monkeypatch.setattr(Grammars, "compile", slow)
    monkeypatch.setattr(intake, "GRAMMARS_WAITING", COMPILERS + 2)
    busy = [served.ask(grammar=Grammar("regex", f"[a-z]{number}")) for number in range(COMPILERS)]
    cancelled = served.ask(grammar=BY_REGEX, request_id="leaves")
    late = served.ask(grammar=BY_SCHEMA, deadline_ms=3_600_000)
    full = served.ask(grammar=Grammar("regex", "more")).wait()
    assert full.refused[0] is RefusalCode.QUEUE_FULL
    assert len(served.service._requests) == COMPILERS + 2
    assert served.send(encode_request(Cancel("leaves"))).wait().metas[-1].cancelled
    assert cancelled.wait().refused[0] is RefusalCode.CANCELLED
    wait_until(lambda: len(served.service._requests) == COMPILERS + 1)
    *_, waiting = served.service._requests.values()
    waiting.deadline = time.monotonic()  # only now: it was to be in the queue first
    go.set()
    assert late.wait().refused[0] is RefusalCode.DEADLINE_EXCEEDED
    assert not late.metas
    assert all(each.wait().text for each in busy)
    wait_until(lambda: not served.service._requests)


def test_a_request_whose_grammar_is_compiled_hears_heartbeats(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway gives a request up that hears nothing for ten seconds."""
    go = threading.Event()
    compile_ = Grammars.compile

    def slow(self: Grammars, *arguments: Any, **options: Any) -> CompiledGrammar:
        assert go.wait(20)
        return compile_(self, *arguments, **options)

    monkeypatch.setattr(Grammars, "compile", slow)
    answer = served.ask(grammar=Grammar("regex", "[a-z]5"))
    wait_until(lambda: answer.heartbeats >= 3)
    assert not answer.metas
    go.set()
    assert answer.wait().metas[0].accepted is not None


class Panic(BaseException):
    """As what Python sees of a panic in Rust: no `Exception`."""


def test_a_panic_is_answered_and_costs_nobody_a_place(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def panic(*_: object, **__: object) -> None:
        raise Panic

    for owner, name in ((Grammars, "_compile"), (llguidance.LLMatcher, "deep_copy"), (GrammarMask, "fill")):
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, panic)
            refused = served.ask(grammar=Grammar("regex", "[a-z]{7}")).wait()
        assert refused.refused[0] is RefusalCode.INTERNAL
    assert re.fullmatch("[a-z]{7}", served.ask(grammar=Grammar("regex", "[a-z]{7}")).wait().text)
    wait_until(lambda: not served.service._requests)


def test_a_mask_that_fails_takes_nobody_along(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    fill, accept = GrammarMask.fill, GrammarMask.accept
    calls = {"fill": 0}

    def failing_fill(self: GrammarMask, words: object) -> None:
        calls["fill"] += 1
        if calls["fill"] == 4:
            raise ZeroDivisionError
        fill(self, words)

    served.ask(grammar=Grammar("regex", "[a-z]{20}")).wait()  # which compiles it
    free = served.ask(max_tokens=40, temperature=0, ignore_eos=True)
    monkeypatch.setattr(GrammarMask, "fill", failing_fill)
    failed = served.ask(grammar=Grammar("regex", "[a-z]{20}")).wait()
    assert failed.refused[0] is RefusalCode.INTERNAL
    assert "mask" in failed.refused[1]
    monkeypatch.setattr(GrammarMask, "fill", fill)
    monkeypatch.setattr(GrammarMask, "accept", lambda self, token_id: 1 / 0)
    assert served.ask(grammar=Grammar("regex", "[a-z]{20}")).wait().refused[0] is RefusalCode.INTERNAL
    monkeypatch.setattr(GrammarMask, "accept", accept)
    assert free.wait().metas[-1].usage.completion_tokens == 40
    assert re.fullmatch("[a-z]{3}[0-9]{2}", served.ask(grammar=BY_REGEX).wait().text)


def test_a_grammar_that_cannot_be_followed_on_is_the_requests_fault(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stuck(self: GrammarMask, token_id: int) -> None:
        raise TokenMaskError("too many states")

    served.ask(grammar=Grammar("regex", "[a-z]{20}")).wait()  # which compiles it
    monkeypatch.setattr(GrammarMask, "accept", stuck)
    refused = served.ask(grammar=Grammar("regex", "[a-z]{20}")).wait().refused
    assert refused[0] is RefusalCode.INVALID_GRAMMAR
    assert refused[1].endswith("too many states")
