"""Requests of every kind at once, in an order that only dice choose: what a server meets in a bad week."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from triton_models.engine.engine import Engine
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import FinishReason, Request

LENGTHS = (1, 1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 129, 200, 257)
LARGE_STEP = 992
"""Larger ones have another kernel for prompts on a GPU (`kernels.attention_prefill.MANY_ROWS`)."""
SEEDS = (None, 0, 1, 16, -1, 2**63 - 1, -(2**63), 2**32, 12345)


class EvenTokens:
    """A mask: only even ids."""

    def fill(self, words: Tensor) -> None:
        words.fill_(0x55555555)

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0

    def forced(self) -> Sequence[int]:
        return ()

    def takes(self, tokens: Sequence[int]) -> int:
        return next((at for at, token_id in enumerate(tokens) if token_id % 2), len(tokens))

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        assert self.takes(tokens) == len(tokens) == len(rows)
        for row in rows:
            self.fill(row)


@dataclass
class Seen:
    """What the mix came to."""

    ends: dict[FinishReason, int] = field(default_factory=dict)
    batch_sizes: set[int] = field(default_factory=set)
    prompt_steps: int = 0
    largest_step: int = 0
    """Tokens of prompts and decodes."""
    preemptions: int = 0
    cached_tokens: int = 0
    prompt_logprobs: int = 0
    prompt_logits: int = 0


def wild_mix(engine: Engine, *, requests: int, vocabulary: int, seed: int = 0) -> Seen:
    """Run so many requests through `engine`, in waves; some are cancelled, some run out of time."""
    dice = random.Random(seed)
    seen = Seen()
    shared = _ids(dice, vocabulary, max(LENGTHS))
    waiting = [_request(dice, str(number), vocabulary, shared) for number in range(requests)]
    named: list[str] = []
    before = engine.stats().preemptions
    while waiting or engine.open_requests:
        if waiting and dice.random() < (1.0 if not engine.open_requests else 0.2):
            for _ in range(dice.choice((1, 1, 1, 2, 5, engine.settings.max_running + 9))):
                if waiting:
                    named.append(waiting[-1].request_id)
                    engine.add(waiting.pop())
        if dice.random() < 0.01:
            engine.cancel(dice.choice(named))
        stats = engine.step()
        if stats is not None:
            seen.batch_sizes.add(stats.batch_size)
            seen.prompt_steps += stats.prefill_tokens > 0
            seen.largest_step = max(seen.largest_step, stats.prefill_tokens + stats.batch_size)
        for output in engine.take_outputs():
            assert output.error is None, output
            seen.cached_tokens += output.cached_tokens
            seen.prompt_logprobs += len(output.prompt_logprobs)
            seen.prompt_logits += 0 if output.prompt_logits is None else len(output.prompt_logits.values)
            if output.finish_reason is not None:
                seen.ends[output.finish_reason] = seen.ends.get(output.finish_reason, 0) + 1
    seen.preemptions = engine.stats().preemptions - before
    return seen


def _ids(dice: random.Random, vocabulary: int, length: int) -> tuple[int, ...]:
    return tuple(dice.randrange(vocabulary) for _ in range(length))


def _request(dice: random.Random, name: str, vocabulary: int, shared: tuple[int, ...]) -> Request:
    length = dice.choice(LENGTHS)
    told = random.Random(name).choice((None, None, None, "logits", 0, 1, 20))
    prompt = shared[:length] if dice.random() < 0.3 else _ids(dice, vocabulary, length)
    return Request(
        request_id=name,
        prompt_ids=prompt,
        sampling=_sampling(dice, vocabulary),
        priority=dice.choice((0, 0, 0, -1, 1)),
        # Over before it begins, or never.
        deadline=time.monotonic() if dice.random() < 0.05 else None,
        prefix_cache=dice.random() < 0.8,
        prompt_logprobs=told if isinstance(told, int) else None,
        logits=told == "logits",
    )


def _sampling(dice: random.Random, vocabulary: int) -> SamplingParams:
    """Half of them plain, the others with any of all options together."""
    options: dict[str, object] = {}
    if dice.random() < 0.5:
        kinds = {
            "top_p": (0.5, 0.9),
            "top_k": (1, 16, 300),
            "min_p": (0.02, 0.3),
            "repetition_penalty": (0.8, 1.3),
            "presence_penalty": (-0.5, 1.0),
            "frequency_penalty": (-0.5, 1.0),
            "logprobs": (0, 1, 20),
            "min_tokens": (1, 5),
            "logit_bias": ({0: 5.0}, dict.fromkeys(range(40), -1.0)),
            "mask": (EvenTokens(),),
        }
        options = {name: dice.choice(values) for name, values in kinds.items() if dice.random() < 0.3}
    return SamplingParams(
        temperature=dice.choice((0.0, 0.0, 0.3, 1.0, 1.7)),
        seed=dice.choice(SEEDS),
        max_tokens=dice.choice((5, 6, 16, 40, 90, 140)),
        stop_token_ids=frozenset(dice.sample(range(vocabulary), dice.choice((0, 0, vocabulary // 16)))),
        **options,
    )
