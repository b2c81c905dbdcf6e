"""Chat formats: how a conversation becomes the ids that a model was trained to continue."""

from triton_models.errors import TextError
from triton_models.text.formats.base import ChatFormat
from triton_models.text.formats.chatglm2 import ChatGLM2Format
from triton_models.text.formats.chatglm3 import ChatGLM3Format
from triton_models.text.tokenizer import Tokenizer

__all__ = ["ChatFormat", "ChatGLM2Format", "ChatGLM3Format", "chat_format"]


def chat_format(name: str, tokenizer: Tokenizer) -> ChatFormat:
    """Return the format called `name`, writing with `tokenizer`, which must be of the same name.

    Raises:
        TextError: there is none of that name.
    """
    match name:
        case ChatGLM2Format.name:
            return ChatGLM2Format(tokenizer)
        case ChatGLM3Format.name:
            return ChatGLM3Format(tokenizer)
        case _:
            raise TextError(
                f"unknown chat format {name!r}; there are {ChatGLM2Format.name} and {ChatGLM3Format.name}"
            )
