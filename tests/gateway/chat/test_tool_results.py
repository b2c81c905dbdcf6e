from collections.abc import Iterator
from typing import SupportsIndex

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
