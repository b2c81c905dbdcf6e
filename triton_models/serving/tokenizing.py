"""The work of a tokenizer entry, without Triton's interface."""

from dataclasses import dataclass

from triton_models.errors import TextError
from triton_models.serving.chat_text import ChatText
from wire.limits import IDS_LIMIT
from wire.tokenizing import Tokenizing


@dataclass(frozen=True, slots=True)
class Tokenized:
    """The result of a request; for messages, `text` is without special tokens."""

    ids: list[int]
    text: str
    strings: list[str] | None
    """How each id is displayed, if requested."""


def tokenize(chat: ChatText, request: Tokenizing, vocabulary: int) -> Tokenized:
    """Process `request` for a model with `vocabulary` ids.

    Raises:
        TextError: the chat format cannot express the messages, there are too many ids, or the model has no
            such id.
    """
    ids = _ids(chat, request, vocabulary)
    if len(ids) > IDS_LIMIT:
        raise TextError(f"it comes to {len(ids)} tokens, and at most {IDS_LIMIT} are told")
    text = chat.tokenizer.decode(ids) if request.text is None else request.text
    display = chat.tokenizer.display
    return Tokenized(ids, text, [display(each)[0] for each in ids] if request.strings else None)


def _ids(chat: ChatText, request: Tokenizing, vocabulary: int) -> list[int]:
    if request.ids is not None:
        for at, token_id in enumerate(request.ids):
            if token_id >= vocabulary:
                raise TextError(f"id {token_id} at place {at}: the model has {vocabulary} ids")
        return request.ids
    if request.text is not None:
        encode = chat.format.render_text if request.prefix else chat.tokenizer.encode
        return encode(request.text)
    return chat.format.render_turns(
        request.messages or [],
        add_generation_prompt=request.add_generation_prompt,
        answer_metadata=request.answer_metadata,
    )
