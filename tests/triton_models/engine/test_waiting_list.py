from hypothesis import given
from hypothesis import strategies as st

from tests.triton_models.engine.fake_model import request
from triton_models.engine.sequence import PRIORITY_S, Sequence
from triton_models.engine.waiting_list import WaitingList


def sequence(
    arrival: int, *, priority: int = 0, deadline: float | None = None, arrived_at: float = 0.0
) -> Sequence:
    ask = request(f"r{arrival}", priority=priority, deadline=deadline)
    return Sequence(ask, arrival=arrival, arrived_at=arrived_at, max_tokens=1)


def drain(waiting: WaitingList) -> list[int]:
    order = []
    while (first := waiting.first()) is not None:
        waiting.remove(first.request.request_id)
        order.append(first.arrival)
    return order


@given(st.lists(st.integers(-2, 2), max_size=20), st.data())
def test_order_is_priority_then_arrival_whatever_is_removed(
    priorities: list[int], data: st.DataObject
) -> None:
    waiting = WaitingList()
    members = [sequence(number, priority=priority) for number, priority in enumerate(priorities)]
    for each in data.draw(st.permutations(members)):
        waiting.add(each)
    gone = data.draw(st.sets(st.integers(0, 19), max_size=5))
    for arrival in gone:
        removed = waiting.remove(f"r{arrival}")
        assert (removed is not None) == (arrival < len(members))
    kept = [each for each in members if each.arrival not in gone]
    assert len(waiting) == len(kept)
    assert drain(waiting) == [each.arrival for each in sorted(kept, key=lambda each: each.rank)]


def test_a_preempted_sequence_is_first_of_its_priority_again() -> None:
    waiting = WaitingList()
    for each in (sequence(5), sequence(6), sequence(7, priority=-1)):
        waiting.add(each)
    waiting.add(sequence(2))
    assert drain(waiting) == [7, 2, 5, 6]


def test_who_waits_long_enough_overtakes_the_more_urgent_that_come_later() -> None:
    waiting = WaitingList()
    waiting.add(sequence(0, priority=2, arrived_at=100.0))
    for arrival, arrived_at in enumerate((100.0, 100.0 + PRIORITY_S, 99.0 + 2 * PRIORITY_S), 1):
        waiting.add(sequence(arrival, arrived_at=arrived_at))
    waiting.add(sequence(4, arrived_at=101.0 + 2 * PRIORITY_S))
    assert drain(waiting) == [1, 2, 3, 0, 4]


def test_expired_names_exactly_those_whose_time_is_over() -> None:
    waiting = WaitingList()
    for arrival, deadline in enumerate([10.0, None, 5.0, 7.0]):
        waiting.add(sequence(arrival, deadline=deadline))
    assert waiting.expired(4.9) == []
    assert [each.arrival for each in waiting.expired(7.0)] == [2, 3]
    waiting.remove("r2")
    waiting.remove("r3")
    assert waiting.expired(9.9) == []
    waiting.add(sequence(9, deadline=9.0))
    assert [each.arrival for each in waiting.expired(10.0)] == [0, 9]


def test_what_expired_is_named_until_it_is_removed() -> None:
    waiting = WaitingList()
    waiting.add(sequence(1, deadline=1.0))
    assert [each.arrival for each in waiting.expired(2.0)] == [1]
    assert [each.arrival for each in waiting.expired(2.0)] == [1]
