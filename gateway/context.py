"""Checks prompts of token ids against the model's context; other prompts need a tokenizer."""

from collections.abc import Sequence

from gateway.errors import ContextLengthError
from gateway.generation import Generation, TokenIds
from gateway.upstream import ModelCard


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
            _check(len(generation.prompt.ids), generation, card.max_context)


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
