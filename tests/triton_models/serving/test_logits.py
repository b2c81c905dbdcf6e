"""Logits of prompts, through the whole service."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from tests.triton_models.engine.models.whole_pass import whole_passes
from tests.triton_models.serving.conftest import Served
from tests.triton_models.serving.fakes import FakeResponder, wait_until
from triton_models.engine.models.decoder import Decoder
from triton_models.engine.sequence import PromptLogits
from triton_models.serving.request import LOGITS_BYTES, logits_parts
from wire.refusal import RefusalCode

ALONE: dict[str, Any] = {"logits": True, "max_tokens": 0, "raw": True}


def logits(answer: FakeResponder) -> Any:
    """Return what was told, [tokens, vocabulary]."""
    rows: list[Any] = []
    for content, meta in answer.responses:
        if meta.logits is not None:
            assert meta.logits.first == len(rows)
            rows += list(np.frombuffer(content, "<f4").reshape(-1, meta.logits.vocabulary))
        else:
            assert content == ""
    return np.array(rows)


def test_the_whole_prompt_is_told_and_no_answer(served: Served, model: Decoder) -> None:
    ids = [300 + place * 7 % 500 for place in range(200)]
    answer = served.ask("", prompt_token_ids=ids, **ALONE).wait()
    assert answer.refusal is None
    np.testing.assert_allclose(logits(answer), whole_passes(model, ids).numpy(), atol=1e-3)
    assert answer.metas[0].accepted.prompt_tokens == 200
    last = answer.metas[-1]
    assert (last.finish_reason, last.usage.completion_tokens, last.usage.cached_tokens) == ("length", 0, 0)
    assert served.probe().vocabulary == model.vocab_size


def test_an_id_outside_the_vocabulary_is_refused(served: Served, model: Decoder) -> None:
    answer = served.ask("", prompt_token_ids=[5, model.vocab_size], **ALONE).wait()
    assert answer.refused[0] is RefusalCode.INVALID_REQUEST


def test_a_client_that_left_is_sent_no_more(serve: Callable[..., Served]) -> None:
    served = serve(slow=True, max_running=4, max_batched_tokens=8)
    responder = FakeResponder()
    served.ask("", responder, prompt_token_ids=[300] * 200, **ALONE)
    wait_until(lambda: len(responder.responses) > 2)
    responder.gone = True
    responder.wait()
    assert responder.refused[0] is RefusalCode.CANCELLED
    assert len(logits(responder)) < 200
    wait_until(lambda: served.busy() == 0)


@pytest.mark.parametrize(("vocabulary", "rows"), [(1000, 524), (250_880, 2), (600_000, 1)])
def test_parts_are_small(vocabulary: int, rows: int) -> None:
    values = torch.empty(600 if rows > 2 else 5, vocabulary)
    parts = list(logits_parts(PromptLogits(7, values)))
    assert [part.first for part in parts] == list(range(7, 7 + len(values), rows))
    assert sum(len(part.values) for part in parts) == len(values)
    assert all(len(part.values) == 1 or part.values.nbytes <= LOGITS_BYTES for part in parts)
