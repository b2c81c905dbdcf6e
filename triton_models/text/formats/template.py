"""Models whose conversations a chat template writes: the gateway renders it, and sends token ids."""

from triton_models.errors import TextError
from triton_models.text.formats.base import ChatFormat
from triton_models.text.json_tokenizer import JsonTokenizer
from triton_models.text.tokenizers import Tokenizer


class TemplateFormat(ChatFormat):
    """Text and token ids only: a checkpoint's template is a program, which does not run beside its weights.

    Args:
        tokenizer: names the ids that end an answer, and those that begin every text.
    """

    name = "template"

    def __init__(self, tokenizer: Tokenizer, _template: str | None = None) -> None:
        if not isinstance(tokenizer, JsonTokenizer):
            raise TextError("the format 'template' needs a tokenizer.json")
        super().__init__(tokenizer, (), stop_ids=frozenset(tokenizer.end_ids))
        self._prefix = tokenizer.begin_ids

    def render_turns(self, *_: object, **__: object) -> list[int]:  # noqa: D102 - inherited
        raise TextError(
            "this model's conversations are written by its chat template: send them to the gateway"
        )
