"""Selects the dialect of a model by the names of its inputs, and that dialect's optional parts."""

from gateway.dialects.base import ChannelDialect, Dialect, NudgeDialect, TokenizerDialect
from gateway.dialects.chatglm import ChatGLMDialect
from gateway.dialects.chatglm_channel import ChatGLMChannels
from gateway.dialects.chatglm_nudges import ChatGLMNudges
from gateway.dialects.chatglm_tokenizer import ChatGLMTokenizer
from gateway.errors import UpstreamProtocolError

_DIALECTS: tuple[Dialect, ...] = (ChatGLMDialect(),)

_CHANNELS: dict[type[Dialect], ChannelDialect] = {ChatGLMDialect: ChatGLMChannels()}

_TOKENIZERS: dict[type[Dialect], TokenizerDialect] = {ChatGLMDialect: ChatGLMTokenizer()}

_NUDGES: dict[type[Dialect], NudgeDialect] = {ChatGLMDialect: ChatGLMNudges()}


def choose(entry: str, inputs: frozenset[str]) -> Dialect:
    """Return the dialect for the repository entry `entry` with these `inputs`.

    Raises:
        UpstreamProtocolError: there is none; the message names the inputs found.
    """
    for dialect in _DIALECTS:
        if inputs == dialect.inputs:
            return dialect
    found = ", ".join(sorted(inputs)) or "none"
    raise UpstreamProtocolError(
        f"the model entry {entry!r} speaks no tensor contract known to this gateway; its inputs are: {found}"
    )


def choose_channels(dialect: Dialect) -> ChannelDialect | None:
    """Return the part of `dialect` for delta channels; None: it has none."""
    return _CHANNELS.get(type(dialect))


def choose_tokenizer(dialect: Dialect) -> TokenizerDialect | None:
    """Return the part of `dialect` for tokenizers; None: it has none."""
    return _TOKENIZERS.get(type(dialect))


def choose_nudges(dialect: Dialect) -> NudgeDialect | None:
    """Return the part of `dialect` for nudges; None: it has no request that costs next to nothing."""
    return _NUDGES.get(type(dialect))
