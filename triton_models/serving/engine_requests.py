"""The engine's requests for one generation, one for each choice, and which tokens each may consist of.

Of `allowed_token_ids`, as in vLLM, stop ids are no exception: an answer whose allowed ids hold none ends at
its limit.
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from triton_models.engine.beams import BeamParams, BeamRequest
from triton_models.engine.sampling import SamplingParams, TokenMask
from triton_models.engine.sequence import Request
from triton_models.errors import InvalidRequestError, PromptTooLongError, TokenMaskError, panics_are_errors
from triton_models.text.grammars import CompiledGrammar
from triton_models.text.tokenizers import Tokenizer, bad_word_ids
from wire.request import Generation
from wire.sampling import Sampling

_WORD_BITS = 32
_ALL = 2**_WORD_BITS - 1

Bits = NDArray[np.uint32]
"""Token i is bit i % 32 of word i // 32."""

_SHARED = {field.name for field in fields(SamplingParams)} & set(Sampling.__struct_fields__) - {
    "seed",
    "max_tokens",
    "min_tokens",
    "stop_token_ids",
}
"""What the engine takes as the client gave it."""


def engine_requests(
    generation: Generation,
    keys: Mapping[int, str],
    prompt_ids: Sequence[int],
    *,
    max_tokens: int | None,
    stop_ids: frozenset[int],
    deadline: float | None,
    grammar: CompiledGrammar | None = None,
    limits: "TokenLimits | None" = None,
) -> list[Request] | list[BeamRequest]:
    """Return the requests for the choices, which differ only in their keys and seeds; or one beam search.

    The prompt is computed once, since in the engine sequences with the same beginning share KV blocks. Only
    if the prompt's log-probabilities are requested does each choice compute it again.

    Args:
        generation: the request.
        keys: the choices' ids in the engine, by index.
        prompt_ids: the tokenized prompt.
        max_tokens: from `new_tokens`; even if it is 0, one token is sampled.
        stop_ids: the ids that end a choice.
        deadline: monotonic seconds; None: never.
        grammar: the grammar that each choice must follow.
        limits: which tokens each choice may consist of.

    Raises:
        InvalidRequestError: a sampling parameter out of range, parameters that contradict each other, or
            tokens to go on after that the grammar does not allow.
    """
    prompt = tuple(prompt_ids)
    limit = None if max_tokens is None else max(1, max_tokens)
    if generation.beam_width:
        request = Request(
            request_id=next(iter(keys.values())),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=limit, stop_token_ids=stop_ids, logprobs=generation.logprobs),
            priority=generation.priority,
            deadline=deadline,
        )
        return [_beam_request(generation, keys, request)]
    least = _least(generation, max_tokens)

    def mask(generated: Sequence[int]) -> TokenMask | None:
        held: TokenMask | None = None if grammar is None else grammar.mask()
        if limits is not None:
            held = limits.mask(held, stop_ids=stop_ids, min_tokens=least)
        if held is not None:
            try:
                with panics_are_errors("a token mask"):
                    for token_id in generated:
                        held.accept(token_id)
            except TokenMaskError as error:
                raise InvalidRequestError(f"generated: {error}") from error
        return held

    generated = {index: tuple(ids) for index, ids in going_on(generation)}
    shared = {name: getattr(generation, name) for name in _SHARED}
    return [
        Request(
            request_id=key,
            prompt_ids=prompt,
            sampling=SamplingParams(
                **shared,
                seed=generation.seed_of(index),
                max_tokens=limit,
                min_tokens=least,
                stop_token_ids=stop_ids,
                mask=mask(generated[index]),
            ),
            generated_ids=generated[index],
            priority=generation.priority,
            deadline=deadline,
            prompt_logprobs=generation.prompt_logprobs,
            logits=generation.logits,
        )
        for index, key in keys.items()
    ]


def _beam_request(generation: Generation, keys: Mapping[int, str], request: Request) -> BeamRequest:
    """Return the search for all choices; those that have ended elsewhere are found again, and not told."""
    params = BeamParams(
        width=generation.beam_width,
        length_penalty=generation.length_penalty,
        early_stopping=generation.early_stopping,
    )
    answers = tuple(keys.get(index) for index in range(generation.n))
    return BeamRequest(request=request, params=params, answers=answers)


def going_on(generation: Generation) -> list[tuple[int, list[int]]]:
    """Return the choices that have not ended, by index, with the tokens that each has already."""
    if not generation.generated:
        return [(index, []) for index in range(generation.n)]
    return [(index, ids) for index, ids in enumerate(generation.generated) if ids is not None]


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


class TokenLimits:
    """The limits of one request, for any number of choices. Immutable.

    Args:
        allowed: the only ids that may be sampled; None: all.
        banned: sequences of ids, none empty, that must not be sampled.
        vocabulary: number of ids that the model has.

    Raises:
        InvalidRequestError: an allowed id that the model does not have.
    """

    def __init__(
        self, allowed: Collection[int] | None, banned: Iterable[Sequence[int]], vocabulary: int
    ) -> None:
        if allowed is not None and max(allowed) >= vocabulary:
            raise InvalidRequestError(f"allowed_token_ids has an id outside the vocabulary of {vocabulary}")
        self._vocabulary = vocabulary
        self.ends: dict[int, list[Sequence[int]]] = defaultdict(list)
        """The banned sequences of several ids, by the last but one."""
        self.longest = 1
        """Length of the longest banned sequence."""
        alone = []
        for ids in banned:
            self.longest = max(self.longest, len(ids))
            if len(ids) == 1:
                alone.append(ids[0])
            else:
                self.ends[ids[-2]].append(ids)
        every = np.ones(vocabulary, dtype=np.uint8)
        self.allowed = self.packed(every) if allowed is None else self.bits(allowed)
        """Without the ids that are banned whatever precedes them."""
        self.allowed &= ~self.bits(alone)

    @classmethod
    def of(cls, generation: Generation, tokenizer: Tokenizer, vocabulary: int) -> "TokenLimits | None":
        """Return the limits that `generation` asks for; None: it asks for none.

        Raises:
            InvalidRequestError: an allowed id that the model does not have.
            TextError: a word that is not valid Unicode.
        """
        if generation.allowed_token_ids is None and not generation.bad_words:
            return None
        banned = bad_word_ids(tokenizer, generation.bad_words)
        return cls(generation.allowed_token_ids, banned, vocabulary)

    def bits(self, ids: Iterable[int]) -> Bits:
        """Return a row with the bits of `ids`, none of them negative; the model need not have them."""
        given = np.fromiter(ids, dtype=np.int64)
        flags = np.zeros(self._vocabulary, dtype=np.uint8)
        flags[given[given < self._vocabulary]] = 1
        return self.packed(flags)

    @staticmethod
    def packed(flags: NDArray[np.uint8]) -> Bits:
        """Return a row with a bit for each of `flags`, [vocabulary] of 0 or 1."""
        return np.packbits(np.pad(flags, (0, -len(flags) % _WORD_BITS)), bitorder="little").view(np.uint32)

    def mask(self, grammar: TokenMask | None, *, stop_ids: Collection[int], min_tokens: int) -> "LimitedMask":
        """Return the mask of one choice.

        Args:
            grammar: the choice's mask by its grammar, which applies as well.
            stop_ids: the ids that end the choice.
            min_tokens: before so many tokens the engine samples no stop id.
        """
        return LimitedMask(self, grammar, self.bits(stop_ids), min_tokens)


class LimitedMask:
    """The tokens with which one answer may continue, by `limits` and by its grammar, if it has one."""

    def __init__(
        self, limits: TokenLimits, grammar: TokenMask | None, stop_bits: Bits, min_tokens: int
    ) -> None:
        self._limits = limits
        self._grammar = grammar
        self._stop_bits = stop_bits
        self._min_tokens = min_tokens
        self._tokens = 0
        self._last: deque[int] = deque(maxlen=limits.longest)

    def fill(self, words: Tensor) -> None:
        """Write the allowed tokens to `words`.

        Raises:
            TokenMaskError: there are none, or the grammar has a fault.
        """
        if self._grammar is None:
            words.fill_(-1)
        else:
            self._grammar.fill(words)
        row = self._limit(words, ())
        early = self._tokens < self._min_tokens  # the engine then removes the stop ids
        if not (row & ~self._stop_bits if early else row).any():
            raise TokenMaskError("allowed_token_ids and bad_words leave no token with which it can go on")

    def accept(self, token_id: int) -> None:
        """Continue after `token_id`.

        Raises:
            TokenMaskError: the grammar does not allow the token.
        """
        self._tokens += 1
        self._last.append(token_id)
        if self._grammar is not None:
            self._grammar.accept(token_id)

    def forced(self) -> Sequence[int]:
        """Return the next tokens by the grammar, where it forces any."""
        return () if self._grammar is None else self._grammar.forced()

    def takes(self, tokens: Sequence[int]) -> int:
        """Return how many of `tokens` the grammar takes; among them may be some that the limits remove."""
        return len(tokens) if self._grammar is None else self._grammar.takes(tokens)

    def fill_ahead(self, tokens: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Do what `fill` does for each of `rows`, each after one more of `tokens`."""
        if self._grammar is None:
            for words in rows:
                words.fill_(-1)
        else:
            self._grammar.fill_ahead(tokens, rows)
        for at, words in enumerate(rows, 1):
            self._limit(words, tokens[:at])

    def _limit(self, words: Tensor, ahead: Sequence[int]) -> Bits:
        """Remove what the limits do not allow after the answer and the tokens `ahead`; return the row."""
        row: Bits = words.numpy().view(np.uint32)
        row &= self._limits.allowed
        last = [*self._last, *ahead]
        for ids in self._limits.ends.get(last[-1], ()) if last else ():
            if last[1 - len(ids) :] == list(ids[:-1]):
                row[ids[-1] // _WORD_BITS] &= _ALL ^ (1 << ids[-1] % _WORD_BITS)
        return row
