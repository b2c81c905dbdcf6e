import json
from typing import Any

import pytest

from gateway.commands.load_answer import Answer


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


def test_a_whole_answer_is_one_piece() -> None:
    answer = Answer(sent=0.0)
    answer.finish(event(choices=[{"index": 0, "message": {"content": "a"}}], usage=USAGE))
    assert (len(answer.pieces), answer.tokens, answer.error) == (1, 2, None)
    with pytest.raises(ValueError, match="JSON"):
        Answer(sent=0.0).finish(b"no JSON")
