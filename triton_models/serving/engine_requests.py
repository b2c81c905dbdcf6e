"""The engine's requests for one generation: one for each choice."""

from collections.abc import Sequence
from dataclasses import fields

from triton_models.engine.sampling import SamplingParams, TokenMask
from triton_models.engine.sequence import Request
from triton_models.errors import PromptTooLongError
from triton_models.serving.token_limits import TokenLimits
from triton_models.text.grammars import CompiledGrammar
from wire.request import Generation
from wire.sampling import Sampling

_SEEDS = 2**64

_SHARED = {field.name for field in fields(SamplingParams)} & set(Sampling.__struct_fields__) - {
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
}
"""What the engine takes as the client gave it."""


def engine_requests(
    generation: Generation,
    keys: Sequence[str],
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None,
    stop_ids: frozenset[int],
    deadline: float | None,
    grammar: CompiledGrammar | None = None,
    limits: TokenLimits | None = None,
) -> list[Request]:
    """Return the requests for the choices, which differ only in their keys and seeds.

    The prompt is computed once, since in the engine sequences with the same beginning share KV blocks. Only
    if the prompt's log-probabilities are requested does each choice compute it again.

    Args:
        generation: its `n` is the number of `keys`.
        keys: the choices' ids in the engine.
        prompt_ids: the tokenized prompt.
        max_tokens: from `new_tokens`; even if it is 0, one token is sampled.
        stop_ids: the ids that end a choice.
        deadline: monotonic seconds; None: never.
        grammar: the grammar that each choice must follow.
        limits: which tokens each choice may consist of.

    Raises:
        InvalidRequestError: a sampling parameter out of range, or parameters that contradict each other.
    """
    prompt = tuple(prompt_ids)
    least = _least(generation, max_tokens)

    def mask() -> TokenMask | None:
        held = None if grammar is None else grammar.mask()
        return held if limits is None else limits.mask(held, stop_ids=stop_ids, min_tokens=least)

    shared = {name: getattr(generation, name) for name in _SHARED}
    return [
        Request(
            request_id=key,
            prompt_ids=prompt,
            sampling=SamplingParams(
                **shared,
                seed=None if generation.seed is None else _wrapped(generation.seed + index),
                max_tokens=None if max_tokens is None else max(1, max_tokens),
                min_tokens=least,
                stop_token_ids=stop_ids,
                mask=mask(),
            ),
            priority=generation.priority,
            deadline=deadline,
            prompt_logprobs=generation.prompt_logprobs,
        )
        for index, key in enumerate(keys)
    ]


def kept_prompt(generation: Generation, prompt_ids: list[int], max_context: int) -> list[int]:
    """Return the prompt's last ids, as many as `truncate_prompt_tokens` keeps."""
    keep = generation.truncate_prompt_tokens
    if keep is None:
        return prompt_ids
    if keep < 0:
        # With `max_total_tokens`, `max_tokens` yields to the prompt.
        total = generation.max_total_tokens
        answer = 1 if total is not None else generation.max_tokens or 1
        keep = max(1, min(total or max_context, max_context) - answer)
    return prompt_ids[-keep:]


def new_tokens(generation: Generation, prompt_tokens: int, max_context: int) -> int | None:
    """Return the limit on new tokens, by `max_tokens` and `max_total_tokens`; None: the rest of the context.

    Raises:
        PromptTooLongError: the limit on all tokens leaves no room for an answer.
    """
    if generation.max_total_tokens is None or prompt_tokens >= max_context:
        return generation.max_tokens  # the engine refuses a prompt over the context
    room = min(generation.max_total_tokens, max_context) - prompt_tokens
    if room < 1:
        raise PromptTooLongError(
            f"the prompt has {prompt_tokens} tokens, and prompt and answer together may have"
            f" {generation.max_total_tokens}"
        )
    return room if generation.max_tokens is None else min(room, generation.max_tokens)


def _least(generation: Generation, max_tokens: int | None) -> int:
    """Return the least number of new tokens, which `max_total_tokens` may reduce below `min_tokens`."""
    if max_tokens is None or max_tokens == generation.max_tokens:
        return generation.min_tokens
    return min(generation.min_tokens, max_tokens)


def _wrapped(seed: int) -> int:
    """Return the int64 with the low 64 bits of `seed`."""
    return (seed + _SEEDS // 2) % _SEEDS - _SEEDS // 2
