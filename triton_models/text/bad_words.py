"""Words that an answer must not contain, as sequences of token ids."""

from collections.abc import Iterable

from triton_models.text.tokenizers import Tokenizer

_BREAK = "\n"
"""No tokenizer joins it to the word behind it, so it shows how a word is written within a text."""


def bad_word_ids(tokenizer: Tokenizer, words: Iterable[str]) -> list[tuple[int, ...]]:
    """Return the ids that `tokenizer` makes of each word: at the start, behind a space, and within a text.

    As in vLLM, white space before a word does not count, and other ways to split the word stay possible. vLLM
    does not look at words within a text, where SentencePiece has other ids for them than at the start.

    Raises:
        TextError: a word contains lone surrogates.
    """
    before = tokenizer.encode(_BREAK)
    found: dict[tuple[int, ...], None] = {}
    for each in words:
        word = each.lstrip() or each
        within = tokenizer.encode(_BREAK + word)
        ways = [tokenizer.encode(word), tokenizer.encode(" " + word)]
        if within[: len(before)] == before:
            ways.append(within[len(before) :])
        found |= dict.fromkeys(tuple(ids) for ids in ways if ids)
    return list(found)
