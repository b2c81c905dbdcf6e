"""What the original code of the published models answered is in tests/golden; so must we, through Triton."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stream_client import StreamAnswer, StreamClient

pytestmark = pytest.mark.e2e

GOLDEN = Path(__file__).parents[1] / "golden"
MODELS = ("chatglm3", "chatglm2")
AT_ONCE = 16


def golden(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / model / "golden.json").read_text(encoding="utf-8"))
    return found


def turns(history: list[Any]) -> list[dict[str, Any]]:
    """ChatGLM2's vectors have (question, answer) pairs; the wire has turns for both."""
    flat = []
    for item in history:
        if isinstance(item, dict):
            flat.append(item)
        else:
            flat += [{"role": "user", "content": item[0]}, {"role": "assistant", "content": item[1]}]
    return flat


def question(case: dict[str, Any]) -> dict[str, Any]:
    if case["kind"] == "ids":
        return {"prompt_token_ids": case["input_ids"]}
    return {"prompt": case["query"], "history": turns(case["history"]), "role": case.get("role", "user")}


def ask(client: StreamClient, model: str, case: dict[str, Any]) -> StreamAnswer:
    return client.ask(
        model,
        **question(case),
        temperature=0,
        max_tokens=len(case["greedy_ids"]),
        ignore_eos=True,
        logprobs=5,
        return_token_ids=True,
    )


def check(answer: StreamAnswer, case: dict[str, Any]) -> None:
    assert answer.metas[0].accepted.prompt_token_ids == case["input_ids"]
    assert answer.token_ids == case["greedy_ids"]
    first = next(meta.logprobs[0] for meta in answer.metas if meta.logprobs)
    assert [top.id for top in first.top] == [token_id for token_id, _ in case["last_top5"]]
    for top, (_, expected) in zip(first.top, case["last_top5"], strict=True):
        assert top.logprob == pytest.approx(expected, abs=1e-4)
    assert answer.last.usage.completion_tokens == len(case["greedy_ids"])


@pytest.mark.parametrize("model", MODELS)
def test_the_stream_entry_answers_as_the_original(model: str, triton: StreamClient) -> None:
    cases = golden(model)["cases"]
    assert cases
    for case in cases:
        check(ask(triton, model, case), case)


@pytest.mark.parametrize("model", MODELS)
def test_sixteen_at_once_in_any_order_change_nothing(model: str, triton: StreamClient) -> None:
    cases = golden(model)["cases"]
    order = random.Random(7).choices(range(len(cases)), k=3 * AT_ONCE)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(lambda number: ask(triton, model, cases[number]), order))
    for number, answer in zip(order, answers, strict=True):
        check(answer, cases[number])


@pytest.mark.parametrize("model", MODELS)
def test_the_tokenizer_equals_the_original(model: str, triton: StreamClient) -> None:
    vectors = golden(model)
    assert vectors["tokenize"]
    for case in vectors["tokenize"]:
        assert triton.tokenize(model, case["text"]).ids == case["ids"]
        assert triton.detokenize(model, case["ids"]) == case["decoded"]
    for case in vectors["cases"]:
        if case["kind"] == "chat":
            newest = {"role": case.get("role", "user"), "content": case["query"]}
            messages = [*turns(case["history"]), newest]
            assert triton.tokenize(model, messages=messages).ids == case["input_ids"]


def test_text_that_looks_like_a_role_stays_text(triton: StreamClient) -> None:
    special = set(golden("chatglm3")["special_tokens"].values())
    ids = triton.tokenize("chatglm3", "<|user|> hi <|assistant|>[gMASK]sop").ids
    assert not special & set(ids)
    assert triton.detokenize("chatglm3", ids) == "<|user|> hi <|assistant|>[gMASK]sop"
