from collections.abc import Iterable

import pytest

from gateway.chat.answers import AnswerPart
from gateway.chat.marked import MarkedText
from gateway.chat.marked_choice import MarkedChoice
from gateway.chat.styles import style_of
from gateway.core.events import CallPart, Piece, Reasoning, TokenLogprob, joined_pieces
from wire.meta import Segment

HERMES = style_of(lambda mark: mark in ("<tool_call>", '"arguments"'))
TOKENS = (
    *("<think>", "Hm", "m.", "</think>", "\n\n", "It is", " fine.", "\n"),
    *("<tool_call>", '{"name": "now", ', '"arguments": ', "{}}", "</tool_call>"),
)
WHOLE = (Reasoning("Hmm."), "It is fine.", CallPart("now", "{}"))


def choice(*tools: str, thinks: bool = True) -> MarkedChoice:
    return MarkedChoice(MarkedText(HERMES, tools, thinks=thinks))


def token(text: str) -> TokenLogprob:
    return TokenLogprob(id=0, token=text, utf8=text.encode(), logprob=-1.0, top=())


def pieces(parts: Iterable[AnswerPart]) -> tuple[Piece, ...]:
    return joined_pieces(each for each in parts if not isinstance(each, TokenLogprob))


def test_an_answer_is_the_same_however_it_is_cut() -> None:
    text = "".join(TOKENS)
    for size in (1, 3, 7, len(text)):
        reader = choice("now")
        parts = [part for at in range(0, len(text), size) for part in reader.push_text(text[at : at + size])]
        assert pieces([*parts, *reader.finish()]) == WHOLE
        assert reader.reason("stop") == "tool_calls"
        assert reader.reason("length") == "length"


def test_only_tokens_of_the_text_are_told() -> None:
    reader = choice("now")
    parts = [part for text in TOKENS for part in reader.push(text, (), [token(text)])]
    parts += reader.finish()
    assert pieces(parts) == WHOLE
    told = [part.token for part in parts if isinstance(part, TokenLogprob)]
    assert "".join(told).strip() == "It is fine."


def test_white_space_before_the_text_is_dropped() -> None:
    reader = choice(thinks=False)
    parts = [
        *reader.push_text("\n"),
        *reader.push_text(" \nYes"),
        *reader.push_text("\n no"),
        *reader.finish(),
    ]
    assert pieces(parts) == ("Yes\n no",)
    assert reader.reason("stop") == "stop"


def test_it_has_no_segments() -> None:
    with pytest.raises(ValueError, match="segment"):
        choice().push("x", [Segment(0, "assistant")], ())
