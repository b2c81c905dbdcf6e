import asyncio
from typing import Any

import pytest

from gateway.limits.admission import Pacing

STAGES = 3


async def work(pacing: Pacing, number: int, done: list[tuple[str, int]]) -> None:
    await pacing.enter()
    done.append(("begun", number))
    for _ in range(STAGES):
        await asyncio.sleep(0)
    done.append(("ended", number))


async def test_the_first_of_a_burst_end_before_the_last_begin() -> None:
    done: list[tuple[str, int]] = []
    pacing = Pacing(at_once=4)
    await asyncio.gather(*(work(pacing, number, done) for number in range(40)))
    assert [number for what, number in done if what == "begun"] == list(range(40))
    begun_meanwhile = [what for what, _ in done[: done.index(("ended", 0))]].count("begun")
    assert begun_meanwhile <= 4 * (STAGES + 1)


async def test_few_enter_without_waiting() -> None:
    pacing = Pacing(at_once=2)
    for _ in range(2):
        with pytest.raises(StopIteration):
            pacing.enter().send(None)


async def test_there_is_room_again_in_every_turn() -> None:
    pacing = Pacing(at_once=1)
    for _ in range(5):
        await asyncio.wait_for(pacing.enter(), 5)
        await asyncio.sleep(0)


async def test_who_left_takes_nobodys_place() -> None:
    pacing = Pacing(at_once=1)
    entered: list[int] = []

    async def enter(number: int) -> None:
        await pacing.enter()
        entered.append(number)

    tasks = [asyncio.create_task(enter(number)) for number in range(4)]
    await asyncio.sleep(0)
    tasks[1].cancel()
    tasks[2].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert entered == [0, 3]


async def test_it_rests_once_nobody_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    pacing = Pacing()
    await pacing.enter()
    for _ in range(3):
        await asyncio.sleep(0)
    turns = 0
    whole = asyncio.get_running_loop().call_soon

    def counting(*arguments: Any, **options: Any) -> asyncio.Handle:
        nonlocal turns
        turns += getattr(arguments[0], "__name__", "") == "_turn"
        return whole(*arguments, **options)

    monkeypatch.setattr(asyncio.get_running_loop(), "call_soon", counting)
    for _ in range(5):
        await asyncio.sleep(0)
    assert turns == 0
