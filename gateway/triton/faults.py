"""What is wrong with a server, for `tritongate serve` and `check`: published faults, or it is no Triton."""

import asyncio
import logging
from typing import Final

from gateway.triton.client import Client
from gateway.triton.errors import Fault, TritonError

_RETRY_S = 5.0
_NOT_THERE = (Fault.UNREACHABLE, Fault.DEADLINE)

FAULTS: Final = (
    ((2, 59, 1), "an HTTP body of some MB ends the server (CVE-2025-23310, 23311)"),
    ((2, 59, 1), "clients run code through shared memory (CVE-2025-23319, 23320, 23334)"),
    ((2, 67, 0), "the keys of restricted protocols can be bypassed (CVE-2026-24206, 24207)"),
    ((2, 71, 0), "what NVIDIA's bulletins up to 5875 describe"),
)
"""The first version without each, and what it is. 2.59.1 is release 25.07, 2.67 is 26.03, 2.71 is 26.07."""
GATEWAY: Final = "tritongate"
"""What a gateway calls itself where its clients know Triton's protocol."""
FIRST_WITHOUT: Final = "26.07 (2.71.0)"

_log = logging.getLogger(__name__)


def published_faults(version: str) -> str | None:
    """Return a sentence about the faults of Triton `version`, such as 2.51.0; None: none is known."""
    numbers = version.split(".")
    if not all(number.isascii() and number.isdigit() for number in numbers):
        return None
    faults = [text for fixed, text in FAULTS if tuple(map(int, numbers)) < fixed]
    if not faults:
        return None
    return (
        f"Triton {version} has published faults: {'; '.join(faults)}. "
        f"The first release without them is {FIRST_WITHOUT}."
    )


async def faults_of(client: Client) -> str | None:
    """Return what is wrong with the server behind `client`; None: nothing is known.

    Raises:
        TritonError: it did not answer.
    """
    server = await client.server()
    if server.name == GATEWAY:
        return "a tritongate gateway is there, not a Triton: its models are not served"
    return published_faults(server.version) if server.name == "triton" else None


async def warn_of_faults(client: Client) -> None:
    """Log a warning if something is wrong with the server behind `client`, once it is reached."""
    while True:
        try:
            found = await faults_of(client)
        except TritonError as error:
            if error.fault not in _NOT_THERE:
                return
        else:
            if found is not None:
                _log.warning(found, extra={"upstream": client.address})
            return
        await asyncio.sleep(_RETRY_S)
