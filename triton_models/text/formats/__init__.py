"""Chat formats, one file a family: how a conversation becomes the ids that a model continues."""

from typing import Final

from triton_models.text.formats.base import ChatFormat
from triton_models.text.formats.chatglm2 import ChatGLM2Format
from triton_models.text.formats.chatglm3 import ChatGLM3Format
from triton_models.text.formats.glm4 import GLM4Format
from triton_models.text.formats.template import TemplateFormat
from triton_models.text.tokenizers import Tokenizer

__all__ = ["ChatFormat", "ChatGLM2Format", "ChatGLM3Format", "GLM4Format", "TemplateFormat", "chat_format"]

_FORMATS: Final = {each.name: each for each in (ChatGLM2Format, ChatGLM3Format, GLM4Format, TemplateFormat)}


def chat_format(name: str, tokenizer: Tokenizer, template: str | None = None) -> ChatFormat:
    """Return the format called `name`.

    Args:
        name: the format's name in settings and on the wire.
        tokenizer: encodes the text; it must be for the same chat format.
        template: the checkpoint's own `chat_template`, for wording that differs between revisions.
    """
    return _FORMATS[name](tokenizer, template)
