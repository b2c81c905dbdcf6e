"""Which dialect a model speaks, told by the names of its inputs.

And whether models of that dialect have delta channels, and a tokenizer to ask.
"""

from gateway.dialects.base import ChannelDialect, Dialect, TokenizerDialect
from gateway.dialects.chatglm import ChatGLMDialect
from gateway.dialects.chatglm_channel import ChatGLMChannels
from gateway.dialects.chatglm_tokenizer import ChatGLMTokenizer
from gateway.errors import UpstreamProtocolError

_DIALECTS: tuple[Dialect, ...] = (ChatGLMDialect(),)

_CHANNELS: dict[type[Dialect], ChannelDialect] = {ChatGLMDialect: ChatGLMChannels()}

_TOKENIZERS: dict[type[Dialect], TokenizerDialect] = {ChatGLMDialect: ChatGLMTokenizer()}


def choose(entry: str, inputs: frozenset[str]) -> Dialect:
    """Return the dialect for the repository entry `entry`, which has `inputs`.

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
    """Return how answers over a delta channel are asked for in `dialect`; None: it has no channels."""
    return _CHANNELS.get(type(dialect))


def choose_tokenizer(dialect: Dialect) -> TokenizerDialect | None:
    """Return how tokens are asked for in `dialect`; None: its models tokenise for themselves alone."""
    return _TOKENIZERS.get(type(dialect))
