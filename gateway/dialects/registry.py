"""Selects the dialect of a model by the names of its inputs."""

from gateway.dialects.base import Dialect
from gateway.dialects.chatglm import ChatGLMDialect
from gateway.errors import UpstreamProtocolError

_DIALECTS: tuple[Dialect, ...] = (ChatGLMDialect(),)


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
