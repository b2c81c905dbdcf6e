"""Makes an engine do everything once, so that no client's request is the first of its kind."""

import logging
import math
import time
from collections.abc import Sequence

from torch import Tensor

from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Request
from triton_models.errors import ModelError

log = logging.getLogger(__name__)

_NEW_TOKENS = 4
_ROWS, _TIMED_TOKENS = 8, 6
"""Of the steps that are timed: rows, and how many there are."""
_HOST_S = 0.00001
"""What a row costs before and after the step, which for another sequence's would be beside one."""


class AnyToken:
    """A token mask that allows every token, and takes next to no time: what remains is the engine's own."""

    def fill(self, words: Tensor) -> None:
        """Allow every token."""
        words.fill_(-1)

    def accept(self, token_id: int) -> None:
        """Allow what follows any token."""

    def forced(self) -> Sequence[int]:
        """Force nothing."""
        return ()

    def takes(self, tokens: Sequence[int]) -> int:
        """Take all tokens."""
        return len(tokens)

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Allow every token after each of them, too."""
        for row in rows[: len(tokens)]:
            self.fill(row)


def warm_up(engine: Engine) -> None:
    """Run requests of every kind to their end, during which kernels are compiled and libraries initialised.

    They cover prompts of one token, of a few, and of several steps, with and without log-probabilities or
    logits; every way to sample; and prompts in the same step as decodes.

    Raises:
        ModelError: a request failed, so later ones would fail too.
    """
    began = time.monotonic()
    new_tokens = min(_NEW_TOKENS, engine.max_context - 1)
    longest = min(2 * engine.settings.max_batched_tokens + 1, engine.max_context - new_tokens)
    samplings = [
        SamplingParams(temperature=0.0, max_tokens=new_tokens),
        SamplingParams(temperature=1.0, max_tokens=new_tokens),
        SamplingParams(temperature=1.0, top_k=5, top_p=0.5, min_p=0.01, max_tokens=new_tokens),
        SamplingParams(
            temperature=1.0,
            logprobs=3,
            logit_bias={0: 1.0},
            repetition_penalty=1.1,
            frequency_penalty=0.1,
            stop_token_ids=frozenset({1}),
            min_tokens=new_tokens,
            max_tokens=new_tokens,
            mask=AnyToken(),
        ),
    ]
    together = engine.settings.max_running + engine.settings.max_waiting
    for length in (1, 23, longest):
        for number, sampling in enumerate(samplings[:together]):
            request = Request(
                request_id=f"warm-up {number}",
                prompt_ids=(number,) * min(length, longest),
                sampling=sampling,
                prefix_cache=False,  # or there would be nothing left to compute
                prompt_logprobs=None if number else 3,
                logits=number == 1 and length < longest,
            )
            engine.add(request)
        while engine.open_requests:
            engine.step()
            for output in engine.take_outputs():
                if output.error is not None:
                    raise ModelError(f"the warm-up failed: {output.error}")
    _time_rows(engine)
    log.info("warmed up in %.1f s", time.monotonic() - began)


def _time_rows(engine: Engine) -> None:
    """Have the engine know how long its steps take."""
    rows = min(_ROWS, engine.settings.max_running)
    if rows == 1 or not engine.settings.draft_tokens or engine.max_context <= _TIMED_TOKENS:
        return
    one, more = (_seconds(engine, count) for count in (1, rows))
    if math.isinf(one) or math.isinf(more):
        return
    row = min(one, max(0.0, (more - one) / (rows - 1)) + _HOST_S)
    engine.note_times(one, row)
    log.info("a step of one row takes %.2f ms, and one row more adds %.3f ms", 1000 * one, 1000 * row)


def _seconds(engine: Engine, rows: int) -> float:
    """Return the shortest time of a step with so many rows, each of a sequence."""
    sampling = SamplingParams(temperature=0.0, max_tokens=_TIMED_TOKENS)
    for number in range(rows):
        engine.add(
            Request(request_id=f"timed {number}", prompt_ids=(0,), sampling=sampling, prefix_cache=False)
        )
    shortest = math.inf
    while engine.open_requests:
        stats = engine.step()
        if (
            stats is not None
            and stats.decode_tokens == rows
            and not stats.prefill_tokens + stats.guessed_tokens
        ):
            shortest = min(shortest, stats.seconds)
    engine.take_outputs()
    return shortest
