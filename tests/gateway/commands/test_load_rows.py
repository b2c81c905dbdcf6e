import json
from typing import Any

import pytest

from gateway.commands.load_rows import Answer, percentile, summarise


def event(**document: Any) -> bytes:
    return json.dumps(document).encode()


USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}


def text(said: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "text": said, "finish_reason": reason}


def delta(said: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": 0, "delta": said, "finish_reason": reason}


@pytest.mark.parametrize(
    ("choices", "shown"),
    [
        ([text("a"), text(""), text("", "length")], [0, 2]),
        ([delta({"role": "assistant", "content": ""}), delta({"content": "a"}), delta({}, "stop")], [1, 2]),
        ([delta({"reasoning_content": "a"}), delta({"reasoning": "b"}), delta({"content": "c"})], [0, 1, 2]),
        ([delta({"role": "assistant", "content": None}), delta({"tool_calls": [{"index": 0}]})], [1]),
    ],
)
def test_pieces_are_what_shows_something(choices: list[dict[str, Any]], shown: list[float]) -> None:
    answer = Answer(sent=0.0)
    for at, choice in enumerate(choices):
        answer.take_event(float(at), event(choices=[choice], usage=None))
    answer.take_event(9.0, event(choices=[], usage=USAGE))
    answer.take_event(9.0, b"[DONE]")
    answer.finish(None)
    assert answer.pieces == shown
    assert (answer.prompt_tokens, answer.tokens, answer.error) == (3, 2, None)
    assert answer.ended > 0


def test_an_error_in_a_stream_fails_the_answer() -> None:
    answer = Answer(sent=0.0)
    answer.take_event(1.0, event(choices=[text("a")]))
    answer.take_event(2.0, event(error={"message": "lost"}))
    answer.finish(None)
    assert "lost" in (answer.error or "")


def test_an_answer_without_counts_has_failed() -> None:
    answer = Answer(sent=0.0)
    answer.take_event(1.0, event(choices=[text("a", "stop")]))
    answer.finish(None)
    assert answer.error is not None


def test_what_was_said_is_kept_for_the_next_turn() -> None:
    streamed = Answer(sent=0.0)
    for choice in (delta({"content": "a"}), text("b") | {"token_ids": [7]}, text("") | {"token_ids": [8]}):
        streamed.take_event(1.0, event(choices=[choice], usage=USAGE))
    assert (streamed.text, streamed.ids, streamed.tokens) == ("ab", [7, 8], 2)
    streamed.need_ids()
    assert streamed.error is None
    whole = Answer(sent=0.0)
    whole.finish(event(choices=[{"index": 0, "message": {"content": "a"}}], usage=USAGE))
    assert whole.text == "a"
    whole.need_ids()
    assert whole.error == "0 ids of 2 tokens, and the next turn needs them"


def test_a_whole_answer_is_one_piece() -> None:
    answer = Answer(sent=0.0)
    answer.finish(event(choices=[{"index": 0, "message": {"content": "a"}}], usage=USAGE))
    assert (len(answer.pieces), answer.tokens, answer.error) == (1, 2, None)
    with pytest.raises(ValueError, match="JSON"):
        Answer(sent=0.0).finish(b"no JSON")


def answer(sent: float, *pieces: float, tokens: int, error: str | None = None) -> Answer:
    return Answer(
        sent=sent, pieces=list(pieces), ended=pieces[-1], prompt_tokens=5, tokens=tokens, error=error
    )


def test_a_row_is_computed_from_the_answers() -> None:
    answers = [
        answer(10.0, 10.25, 10.26, 10.28, tokens=4),
        answer(10.0, 11.0, 11.5, tokens=2),
        answer(10.0, 12.0, tokens=0, error="full"),
    ]
    found = summarise(answers, clients=3, rate=0.0)
    assert (found.clients, found.requests, found.failed, found.error) == (3, 3, 1, "full")
    assert found.seconds == pytest.approx(1.5)
    assert found.tokens_per_second == pytest.approx(6 / 1.5)
    assert (found.ttft_p50, found.ttft_p99) == pytest.approx((250, 1000))
    assert (found.per_token_p50, found.per_token_p99) == pytest.approx((10, 500))
    assert (found.gap_p50, found.gap_p99) == pytest.approx((20, 500))
    assert found.within == pytest.approx(1 / 3)
    assert (found.prompt_tokens, found.output_tokens, found.pieces) == (5, 3, 2.5)


def test_failures_alone_are_no_measurement() -> None:
    with pytest.raises(RuntimeError, match=r"^all 1 requests failed, the first: full$"):
        summarise([answer(0.0, 1.0, tokens=0, error="full")], clients=1, rate=0.0)
    with pytest.raises(RuntimeError, match=r"^no request was made$"):
        summarise([], clients=0, rate=0.1)


@pytest.mark.parametrize(("percent", "expected"), [(50, 2), (51, 3), (99, 4), (0, 1), (1, 1), (100, 4)])
def test_percentiles_are_values_that_occurred(percent: int, expected: float) -> None:
    assert percentile([4, 2, 3, 1], percent) == expected


def test_a_percentile_of_nothing_is_zero() -> None:
    assert percentile([], 50) == 0
