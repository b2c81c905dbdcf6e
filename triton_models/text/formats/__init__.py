"""Chat formats: how a conversation becomes the ids that a model was trained to continue."""

from triton_models.errors import TextError
from triton_models.text.formats.base import ChatFormat
from triton_models.text.formats.chatglm2 import ChatGLM2Format
from triton_models.text.formats.chatglm3 import ChatGLM3Format
from triton_models.text.formats.glm4 import GLM4Format
from triton_models.text.tokenizers import Tokenizer

__all__ = ["ChatFormat", "ChatGLM2Format", "ChatGLM3Format", "GLM4Format", "chat_format"]


def chat_format(name: str, tokenizer: Tokenizer, template: str | None = None) -> ChatFormat:
    """Return the format called `name`.

    Args:
        name: the format's name in settings and on the wire.
        tokenizer: encodes the text; it must be for the same chat format.
        template: the checkpoint's own `chat_template`, for wording that differs between revisions.

    Raises:
        TextError: there is no format of that name.
    """
    match name:
        case ChatGLM2Format.name:
            return ChatGLM2Format(tokenizer)
        case ChatGLM3Format.name:
            return ChatGLM3Format(tokenizer)
        case GLM4Format.name:
            return GLM4Format(tokenizer, template)
        case _:
            known = (ChatGLM2Format.name, ChatGLM3Format.name, GLM4Format.name)
            raise TextError(f"unknown chat format {name!r}; there are {', '.join(known)}")
