from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner

from bench import affinity
from gateway.core.request import Conversation, Message
from gateway.triton import attempts


def test_each_way_of_choosing_is_in_effect_while_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Conversation((Message(role="system", content="x" * 4000), Message(role="user", content="Hi")))
    measured: list[tuple[int, bool]] = []

    async def measure(addresses: Sequence[str], *_arguments: object, **_options: Any) -> str:
        # As the pool looks it up.
        measured.append((len(addresses), vars(attempts)["prefix_key"]("m", long) is not None))
        return "1.000"

    monkeypatch.setattr(affinity, "_measure", measure)
    result = CliRunner().invoke(affinity.main, ["a:1", "b:1", "--model", "m"], catch_exceptions=False)

    assert result.exit_code == 0, result.output
    assert measured == [(1, False), (2, False), (2, True)]
