"""How a report shows the tokens of a prompt: as the pieces of its text."""

from collections.abc import Iterable, Iterator

from triton_models.text.tokenizers import Tokenizer


def shown_tokens(
    tokenizer: Tokenizer, ids: Iterable[int], *, special: bool = False
) -> Iterator[tuple[str, bytes]]:
    """Yield what each of a prompt's ids shows as, and the UTF-8 bytes that it adds to the prompt's text.

    The bytes, joined, are the text that a `Detokenizer` makes of the ids, and so is what is shown, but for
    the names of special tokens and for characters that several tokens share. That a text's first space does
    not count is the only difference to `Tokenizer.display`.

    Args:
        tokenizer: of the model.
        ids: all of the prompt's.
        special: ids that are no text are in it, by their names.
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
