import json

from msgspec import UNSET

from gateway.generation import PromptLogprob, TopLogprob
from gateway.openai.answer import encode
from gateway.openai.prompt_logprobs import prompt_logprobs_document

LIKELY = tuple(
    TopLogprob(id=id_, token=token, utf8=token.encode(), logprob=logprob)
    for id_, token, logprob in ((7, "b", -0.25), (5, "a", -1.5), (9, "c", -2.5))
)
FIRST = PromptLogprob(id=3, token="sop", utf8=b"", logprob=None, top=())
AMONG = PromptLogprob(id=5, token="a", utf8=b"a", logprob=-1.5, top=LIKELY, rank=2)
BELOW = PromptLogprob(id=8, token="你", utf8="你".encode(), logprob=-9999.0, top=LIKELY, rank=900)


def entry(logprob: float, rank: int, token: str) -> dict[str, object]:
    return {"logprob": logprob, "rank": rank, "decoded_token": token}


def test_each_token_is_told_with_what_was_likelier() -> None:
    document = json.loads(encode(prompt_logprobs_document([FIRST, AMONG, BELOW], 2)))
    likely = {"7": entry(-0.25, 1, "b"), "5": entry(-1.5, 2, "a")}
    assert document == [None, likely, {"8": entry(-9999.0, 900, "你"), **likely}]
    assert [list(each or ()) for each in document] == [[], ["5", "7"], ["8", "7", "5"]], "its own comes first"


def test_no_alternatives_leave_the_token_itself() -> None:
    document = json.loads(encode(prompt_logprobs_document([FIRST, AMONG], 0)))
    assert document == [None, {"5": entry(-1.5, 2, "a")}]


def test_it_is_there_only_where_it_was_asked_for() -> None:
    assert prompt_logprobs_document([FIRST, AMONG], None) is UNSET
    assert prompt_logprobs_document([FIRST], 20) == [None]
