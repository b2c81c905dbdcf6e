"""How log-probability reports show the tokens of a prompt: as pieces of the prompt's text."""

from collections.abc import Iterable, Iterator

from triton_models.text.tokenizers import Tokenizer


def shown_tokens(
    tokenizer: Tokenizer, ids: Iterable[int], *, special: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Yield how each of a prompt's ids is shown, and the UTF-8 bytes that it adds to the prompt's text.

    The joined bytes are the text that a `Detokenizer` makes of the ids. The joined strings are that text,
    too, except for the names of special tokens and for characters that several tokens share. The only
    difference from `Tokenizer.display` is that the leading space of the text is dropped.

    Args:
        tokenizer: of the model.
        ids: all of the prompt's.
        special: include ids that are not text, by name.
    """
    at_start = True
    for token_id in ids:
        token, utf8 = tokenizer.display(token_id)
        piece = tokenizer.piece(token_id)
        if special and not piece:
            piece, utf8 = token, token.encode()
        if at_start and piece:
            at_start = False
            if isinstance(piece, str):
                token, utf8 = token.removeprefix(" "), utf8.removeprefix(b" ")
        yield token, utf8
