"""What all chat formats have in common."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

from triton_models.errors import TextError
from triton_models.text.call_grammar import CallSyntax
from triton_models.text.tokenizers import Tokenizer
from wire.history import Turn


class ChatFormat(ABC):
    """Renders conversations for one family of models; holds no state of any conversation.

    A conversation that the format cannot express is refused with a `TextError` that names the turn; nothing
    in it is ever left out.

    Args:
        tokenizer: encodes the text.
        prefix: the names of the special ids with which every prompt begins.
        stop_ids: ids with which the model itself ends its answer. They are not part of the answer's text.
        segment_roles: ids that open a new segment within an answer, with the role that the wire reports.
    """

    name: ClassVar[str]
    """The format's name in settings and on the wire."""

    call_syntax: ClassVar[CallSyntax | None] = None
    """How a call is written. With None, no system turn may offer tools, and no observation may follow."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prefix: Sequence[str],
        *,
        stop_ids: frozenset[int],
        segment_roles: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        self._tokenizer = tokenizer
        self._prefix = [tokenizer.special_ids[name] for name in prefix]
        self.stop_ids = stop_ids
        self.segment_roles = segment_roles

    @abstractmethod
    def render_turns(
        self, turns: Sequence[Turn], *, add_generation_prompt: bool = True, answer_metadata: str | None = None
    ) -> list[int]:
        """Return the input ids of `turns`.

        Args:
            turns: the whole conversation, oldest turn first.
            add_generation_prompt: end where the model's answer begins.
            answer_metadata: the answer's first line, if the model is not to choose it.

        Raises:
            TextError: the format cannot express it.
        """

    def render_text(self, text: str) -> list[int]:
        """Return the input ids of plain text to be continued: those that begin every prompt, then the text's.

        The published tokenizers encode text in the same way (`build_inputs_with_special_tokens`).

        Raises:
            TextError: `text` is not valid Unicode.
        """
        return self._prefix + self._tokenizer.encode(text)


def turn_error(turns: Sequence[Turn], at: int, why: str) -> TextError:
    """Return the error for turn `at`, counted from 0; the prompt is the last turn."""
    return TextError(f"turn {at} ({turns[at].role}) of the conversation: {why}")
