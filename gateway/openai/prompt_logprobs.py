"""Log-probabilities of a prompt in the form that vLLM gives them: for each token what there was to choose.

Source: vLLM's OpenAI-compatible server, `prompt_logprobs`.
"""

from collections.abc import Sequence

from msgspec import UNSET, Struct, UnsetType

from gateway.generation import PromptLogprob


class RankedToken(Struct, frozen=True):
    """A token that was possible at a place of the prompt; `rank` 1 is the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, RankedToken] | None]
"""Of each token of the prompt, by token ids: its own entry first, then those of the likeliest ones. The first
token, which follows nothing, has null."""


def prompt_logprobs_document(tokens: Sequence[PromptLogprob], top: int | None) -> PromptLogprobs | UnsetType:
    """Write them, with the `top` likeliest tokens at each place; None: they were not asked for."""
    return UNSET if top is None else [_possible(token, top) for token in tokens]


def _possible(token: PromptLogprob, top: int) -> dict[int, RankedToken] | None:
    if token.logprob is None:
        return None
    own = {token.id: RankedToken(token.logprob, token.rank, token.token)}
    likely = {
        each.id: RankedToken(each.logprob, place, each.token)
        for place, each in enumerate(token.top[:top], start=1)
        if each.id != token.id
    }
    return own | likely
