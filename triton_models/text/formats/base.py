"""What every chat format offers."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from triton_models.errors import TextError
from wire.history import Role, Turn


class ChatFormat(Protocol):
    """Renders conversations for one family of models; holds no state of any conversation.

    A conversation that the format cannot express is refused with a `TextError` that names the turn; nothing
    in it is ever left out.
    """

    @property
    def name(self) -> str:
        """As checkpoints, settings and the wire spell it."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Ids by which the model itself ends its answer. They are not part of the answer's text."""
        ...

    @property
    def segment_roles(self) -> Mapping[int, str]:
        """Ids that open a new segment inside an answer, with the role that the wire reports for each."""
        ...

    @property
    def supports_tools(self) -> bool:
        """Whether a system turn may offer tools, and observations may follow."""
        ...

    def render(
        self, history: Sequence[Turn], prompt: str, role: Role = "user", *, answer_metadata: str | None = None
    ) -> list[int]:
        """Return the input ids after which the model answers `prompt`, said by `role` after `history`.

        Args:
            history: the turns before, oldest first.
            prompt: the newest turn's text.
            role: who says it.
            answer_metadata: the answer's first line, where the model is not to choose it.

        Raises:
            TextError: the format cannot express it.
        """
        ...

    def render_turns(
        self,
        turns: Sequence[Turn],
        *,
        add_generation_prompt: bool = True,
        answer_metadata: str | None = None,
    ) -> list[int]:
        """Return the input ids of `turns`, the newest included.

        Args:
            turns: oldest first.
            add_generation_prompt: at the end the model's answer begins.
            answer_metadata: its first line, where it begins and the model is not to choose it.

        Raises:
            TextError: the format cannot express it.
        """
        ...

    def render_text(self, text: str) -> list[int]:
        """Return the input ids of plain text to be continued: the ids that begin every prompt, then its own.

        As the published tokenizers encode text (`build_inputs_with_special_tokens`).

        Raises:
            TextError: `text` is not valid Unicode.
        """
        ...


def refuse(turns: Sequence[Turn], at: int, why: str) -> TextError:
    """Return the error for turn `at`, counted from 0, the prompt being the last."""
    return TextError(f"turn {at} ({turns[at].role}) of the conversation: {why}")
