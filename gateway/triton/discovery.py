"""Finds the models of a Triton, if the configuration names none.

A model is found when its entry is loaded and has the inputs of a known contract. Any other entry is logged
once, with its inputs, and left alone: a Triton may have other models, too.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from gateway.dialects.registry import choose
from gateway.errors import UpstreamProtocolError
from gateway.triton.backoff import Backoff
from gateway.triton.client import Client, Control, EntryState
from gateway.triton.errors import Fault, TritonError
from gateway.triton.replicas import HealthPolicy

_log = logging.getLogger(__name__)

_NO_FAULT_OF_ENTRY = {Fault.UNREACHABLE, Fault.DEADLINE, Fault.CLOSED}
"""Failures to read an entry's inputs that are the server's."""

Found = Callable[[Client, Sequence[str]], None]


class Discovery:
    """Reads one Triton's repository periodically; run `watch` as a task.

    Args:
        client: of that Triton.
        policy: how often to look.
        found: called after each look with the ids of models that are new since the last, most often none.
    """

    def __init__(self, client: Client, policy: HealthPolicy, found: Found) -> None:
        self._client = client
        self._control = Control(client, timeout_s=policy.probe_timeout_s)
        self._policy = policy
        self._found = found
        self._known: set[str] = set()
        self._rejected: set[str] = set()

    async def watch(self) -> None:
        """Look for ever, with growing pauses while the Triton does not answer."""
        backoff = Backoff(self._policy.backoff_first_s, self._policy.backoff_limit_s)
        reachable = True
        while True:
            try:
                found = await self._look()
            except TritonError as error:
                if reachable:
                    extra = {"upstream": self._client.address, "detail": error.detail}
                    _log.warning("models cannot be listed: %s", error.fault.value, extra=extra)
                reachable = False
                await asyncio.sleep(backoff.next())
            else:
                reachable = True
                backoff.reset()
                self._found(self._client, found)
                await asyncio.sleep(self._policy.interval_s)

    async def _look(self) -> list[str]:
        loaded = {
            entry for entry, state in (await self._control.repository()).items() if state is EntryState.READY
        }
        # An entry that was unloaded may come back with another contract.
        self._rejected &= loaded
        ours = []
        for entry in sorted(loaded - self._known - self._rejected):
            try:
                inputs = await self._control.inputs(entry)
            except TritonError as error:
                if error.fault in _NO_FAULT_OF_ENTRY:
                    raise
                continue  # It is just being unloaded, or broken: the next look will tell.
            try:
                choose(entry, inputs)
            except UpstreamProtocolError as error:
                extra = {"upstream": self._client.address}
                _log.info("model left out: %s", error.message, extra=extra)
                self._rejected.add(entry)
            else:
                ours.append(entry)
        self._known.update(ours)
        return ours
