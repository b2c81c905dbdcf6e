import asyncio
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from gateway.openai.long_list import long_list


@pytest.mark.parametrize("items", [[], [1], list(range(10_000)), ["ä", '"'] * 5_000])
async def test_it_is_the_list(items: list[Any]) -> None:
    assert json.loads(bytes(await long_list(iter(items)))) == items


async def test_others_have_their_turn_every_few_thousand_items() -> None:
    turn = 0
    read_in_turn: Counter[int] = Counter()

    async def others() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    def items() -> Iterator[int]:
        for item in range(50_000):
            read_in_turn[turn] += 1
            yield item

    beside = asyncio.create_task(others())
    await long_list(items())
    beside.cancel()
    assert read_in_turn.total() == 50_000
    assert max(read_in_turn.values()) < 5_000
