import pytest

from gateway.generation import PromptLogprob, TokenLogprob, TopLogprob
from gateway.openai.completion_logprobs import LogprobsWriter


def token(shown: str, utf8: bytes, *likely: str) -> TokenLogprob:
    top = tuple(
        TopLogprob(id=at, token=each, utf8=each.encode(), logprob=-0.5) for at, each in enumerate(likely)
    )
    return TokenLogprob(id=7, token=shown, utf8=utf8, logprob=-1.0, top=top)


TOKENS = [
    token(" a", b" a", " a", "b"),
    token("\\xf0\\x9f", b"\xf0\x9f"),
    token("\\x99", b"\x99"),
    token("\\x82", b"\x82"),
    token("你好", "你好".encode(), "c"),
    token("<|user|>", b""),
    token("x", b"x"),
]
OFFSETS = [0, 2, 2, 2, 3, 5, 5]


@pytest.mark.parametrize("cut", range(len(TOKENS) + 1))
def test_offsets_are_of_characters_however_the_tokens_are_cut(cut: int) -> None:
    writer = LogprobsWriter(5)
    parts = [writer.write(TOKENS[:cut]), writer.write(TOKENS[cut:])]
    assert [place for part in parts for place in part.text_offset] == OFFSETS
    for part in parts:
        lengths = {
            len(part.tokens),
            len(part.token_logprobs),
            len(part.top_logprobs),
            len(part.text_offset),
        }
        assert len(lengths) == 1


def test_the_sampled_token_is_among_the_likely_ones() -> None:
    written = LogprobsWriter(5).write(TOKENS)
    assert written.top_logprobs[0] == {" a": -0.5, "b": -0.5}
    assert written.top_logprobs[4] == {"c": -0.5, "你好": -1.0}
    assert written.top_logprobs[6] == {"x": -1.0}


def test_the_prompts_tokens_come_first_and_the_first_has_no_logprob() -> None:
    prompt = [
        PromptLogprob(id=1, token="sop", utf8=b"", logprob=None, top=()),
        PromptLogprob(id=2, token="你", utf8="你".encode(), logprob=-2.0, top=()),
    ]
    written = LogprobsWriter(5).write([*prompt, *TOKENS[4:5]])
    assert written.tokens == ["sop", "你", "你好"]
    assert written.token_logprobs == [None, -2.0, -1.0]
    assert written.top_logprobs == [None, {"你": -2.0}, {"c": -0.5, "你好": -1.0}]
    assert written.text_offset == [0, 0, 1]


def test_bytes_that_begin_no_character_stay_in_the_text() -> None:
    assert LogprobsWriter(5).write([token("\\x99", b"\x99"), token("a", b"a")]).text_offset == [0, 0]


def test_no_more_alternatives_are_written_than_were_asked_for() -> None:
    assert LogprobsWriter(1).write(TOKENS[:1]).top_logprobs == [{" a": -0.5}]
    assert LogprobsWriter(0).write(TOKENS[4:5]).top_logprobs == [{"你好": -1.0}]
