from collections.abc import Iterator
from typing import SupportsIndex

import pytest

from gateway.chat.conversation import chat_form, to_turns
from gateway.core.request import Message, PastCall
from wire.history import Turn


class Counted(tuple[PastCall, ...]):
    """Calls that count how often they are gone through."""

    __slots__ = ()
    rounds = 0

    def __iter__(self) -> Iterator[PastCall]:
        type(self).rounds += 1
        return super().__iter__()

    def __contains__(self, value: object) -> bool:
        type(self).rounds += 1
        return super().__contains__(value)

    def index(self, value: object, start: SupportsIndex = 0, stop: SupportsIndex = 2**63 - 1, /) -> int:
        type(self).rounds += 1
        return super().index(value, start, stop)


def test_a_result_costs_the_same_beside_many_calls() -> None:
    """A body has room for tens of thousands of calls and results, and reading them stops everyone else."""
    places = range(1000)
    calls = Counted(PastCall(id=f"c{at}", name="f", arguments="{}") for at in places)
    results = [Message(role="tool", content=str(at), answers=f"c{at}") for at in reversed(places)]
    turns = to_turns([Message(role="assistant", content="", calls=calls), *results], chat_form("chatglm3"))
    assert turns[-1000:] == [Turn("observation", str(at)) for at in places]
    assert Counted.rounds < 10


@pytest.mark.parametrize("form", ["chatglm3", "glm4"])
@pytest.mark.parametrize("written", ["Hm.", "[1]", pytest.param("[" * 50_000, id="deep")])
def test_a_call_of_the_past_without_an_object_is_shown_as_it_was_written(form: str, written: str) -> None:
    asked = Message(role="assistant", content="", calls=(PastCall(id="c", name="f", arguments=written),))
    turns = to_turns([asked, Message(role="tool", content="No!", answers="c")], chat_form(form))
    assert turns[0] == Turn("assistant", written, metadata="f")
