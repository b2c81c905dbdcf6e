"""What a tokenizer entry does, apart from Triton."""

from triton_models.serving.chat_text import ChatText
from wire.tokenizing import Tokenizing


def tokenize(chat: ChatText, request: Tokenizing) -> tuple[list[int], str]:
    """Return the ids and the text that `request` comes to; of messages, the text without special tokens.

    Raises:
        TextError: the chat format cannot express the messages.
    """
    if request.ids is not None:
        return request.ids, chat.tokenizer.decode(request.ids)
    if request.text is not None:
        return chat.tokenizer.encode(request.text), request.text
    ids = chat.format.render_turns(
        request.messages or [], add_generation_prompt=request.add_generation_prompt
    )
    return ids, chat.tokenizer.decode(ids)
