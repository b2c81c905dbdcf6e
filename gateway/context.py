"""Checks what depends on a prompt's length: whether it fits the context, and how much is to be told of it.

Only prompts of token ids can be checked against the context here; other prompts need a tokenizer.
"""

from collections.abc import Sequence

from gateway.errors import ContextLengthError, InvalidRequestError
from gateway.generation import Accepted, Generation, TokenIds
from gateway.upstream import ModelCard
from wire.limits import IDS_LIMIT

PROMPT_LOGPROBS_LIMIT = 2**20
"""Log-probabilities of prompts in one answer: up to some 64 MiB of JSON, and several times that in memory."""


def check_context(generations: Sequence[Generation], card: ModelCard) -> None:
    """Refuse prompts of ids that `card`'s model would refuse, with the same message.

    A model that is not ready is not checked: it may come back with a larger context.

    Raises:
        ContextLengthError: a prompt is too long, by itself or with the requested answer.
    """
    if card.max_context is None or not card.ready:
        return
    for generation in generations:
        if isinstance(generation.prompt, TokenIds):
            keep = generation.truncate_prompt_tokens
            if keep is None or keep > 0:
                _check(min(len(generation.prompt.ids), keep or IDS_LIMIT), generation, card.max_context)


def check_prompt_logprobs(generations: Sequence[Generation], accepted: Accepted) -> None:
    """Refuse to report more of the prompts than an answer can have: each choice repeats its prompt's report.

    Args:
        generations: alike except for their prompts.
        accepted: says how many tokens these have.

    Raises:
        InvalidRequestError: it would be more than PROMPT_LOGPROBS_LIMIT.
    """
    asked = generations[0]
    if asked.prompt_logprobs is None:
        return
    reported = accepted.prompt_tokens * asked.n * (1 + asked.prompt_logprobs)
    if reported > PROMPT_LOGPROBS_LIMIT:
        raise InvalidRequestError(
            f"This answer would report {reported} log-probabilities of prompts (tokens, times choices, "
            f"times alternatives and one), and one answer may report {PROMPT_LOGPROBS_LIMIT}.",
            param="prompt_logprobs" if asked.prompt_ranks else "logprobs",
        )


def _check(length: int, generation: Generation, max_context: int) -> None:
    wanted = generation.max_tokens
    if length + (wanted or 1) <= max_context:  # for 0 the engine still samples one
        return
    reason = (
        f"the prompt has {length} tokens; the context is {max_context}, one for the answer"
        if wanted is None or length >= max_context
        else f"the prompt has {length} tokens and max_tokens is {wanted}:"
        f" together {length + wanted}, and the context is {max_context}"
    )
    field = generation.prompt_field
    raise ContextLengthError(reason if field is None else f"{field}: {reason}", param=field)
