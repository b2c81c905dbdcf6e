from dataclasses import replace

import pytest

from bench import cpu_weights
from bench.cpu_weights import make_engine, measure
from bench.engine import MEDIUM


def test_every_form_is_measured_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(MEDIUM, layers=1, hidden=64, feed_forward=64, vocabulary=512)
    monkeypatch.setitem(cpu_weights.SIZES, "tiny", tiny)
    engines = {form: make_engine("tiny", form, 2) for form in ("float32", "int8", "int4")}
    rows = list(measure(engines, (1, 2), rounds=2, new_tokens=4))
    assert [(row.weights, row.batch) for row in rows] == [
        (form, batch) for batch in (1, 2) for form in engines
    ]
    for row in rows:
        assert min(row.step_ms, row.cpu_ms, row.prompt_tok_s) > 0
        (first,) = (each for each in rows if (each.weights, each.batch) == ("float32", row.batch))
        assert row.times == pytest.approx(first.step_ms / row.step_ms)
        assert row.cpu_times == pytest.approx(first.cpu_ms / row.cpu_ms)
    assert not any(engine.open_requests for engine in engines.values())
