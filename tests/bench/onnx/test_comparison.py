from itertools import count

import pytest

from bench.onnx.comparison import Ask, Prompts, measure


def test_entries_are_asked_in_turns_and_compared_with_the_first() -> None:
    asked: list[tuple[str, int, int]] = []

    def entry(name: str, wrong: int) -> Ask:
        def ask(prompts: Prompts, tokens: int) -> Prompts:
            asked.append((name, len(prompts), tokens))
            assert all(len(prompt) == 64 for prompt in prompts)
            answers = [[sum(prompt) + each for each in range(tokens)] for prompt in prompts]
            answers[-1][tokens - wrong :] = [-1] * wrong
            return answers

        return ask

    asks = {"ours": entry("ours", 0), "theirs": entry("theirs", 3)}
    clock = (number**2 for number in count())
    rows = list(measure("m", asks, lambda: next(clock) / 1000, batches=(1, 2), rounds=2, new_tokens=12))
    turn = [(name, batch, tokens) for batch in (1, 2) for name in asks for tokens in (1, 12)]
    assert asked == 3 * turn
    assert [(row.entry, row.batch) for row in rows] == [(n, b) for b in (1, 2) for n in asks]
    assert [row.same for row in rows] == pytest.approx([1, 1 - 3 / 12, 1, 1 - 3 / 24])
    assert [row.cpu_ms for row in rows] == pytest.approx([2 / 11] * 4)
    assert rows[0].times == rows[2].times == 1
    for row in rows:
        assert row.tokens_per_second == pytest.approx(1000 * row.batch / row.step_ms)
