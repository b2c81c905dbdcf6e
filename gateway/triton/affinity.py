"""Chooses the replica that probably has a prompt's beginning in its prefix cache.

Every conversation has an order of all replicas, made of hashes of its beginning and their addresses
(rendezvous hashing): gateways that share nothing agree on it, and when a replica comes or goes, only its own
conversations move. The first replica in that order gets the request unless it has its share of what runs
(bounded load); then the next one does. So a beginning that everybody sends fills one replica after the other
instead of one alone.

Knows prompts and how much runs where, nothing of tensors, health or addresses' meaning.
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

from gateway.core.request import Conversation, PlainText, Prompt, TokenIds
from gateway.triton.replicas import Replica

LOAD_FACTOR = 1.25
"""How many times its even share of the running requests a replica may have (`bench/LOG.md`, 2026-11-23)."""

_WORTH_CHARACTERS = 256
"""A shorter prompt is computed sooner than it is worth a longer queue."""
_CHARACTERS = 4096
"""Of each message and tool; what differs later finds a long common beginning in the cache anyway."""
_MESSAGES = 16
_IDS_PER_CHARACTER = 4
"""Token ids are packed into this many bytes, and a token is about as many characters."""


def prefix_key(model: str, prompt: Prompt) -> bytes | None:
    """Return what all requests of one conversation have in common; None: the prompt is short.

    That is everything up to its first user message, since what comes before that is common to an
    application's users. The same in every process; a few microseconds.
    """
    said: list[tuple[str, str]]
    parts: list[str] = []
    if isinstance(prompt, TokenIds):
        if len(prompt.ids) < _WORTH_CHARACTERS // _IDS_PER_CHARACTER:
            return None
        ids = prompt.ids[: _CHARACTERS // _IDS_PER_CHARACTER]
        return _digest([model, *map(str, ids)])
    if isinstance(prompt, PlainText):
        if len(prompt.text) < _WORTH_CHARACTERS:
            return None
        return _digest([model, prompt.text])
    if isinstance(prompt, Conversation):
        said = [(message.role, message.content) for message in prompt.messages]
        tools = prompt.offer.tools if prompt.offer is not None else ()
        parts = [part for tool in tools for part in (tool.name, tool.description or "")]
    else:
        said = [(turn.role, turn.content) for turn in prompt.history]
        said.append((prompt.role, prompt.text))
    if sum(map(len, parts)) + sum(len(content) for _, content in said) < _WORTH_CHARACTERS:
        return None
    for role, content in said[:_MESSAGES]:
        parts += (role, content)
        if role == "user":
            break
    return _digest([model, *parts])


def _digest(parts: Sequence[str]) -> bytes:
    digest = blake2b(digest_size=16)
    for part in parts:
        start = part[:_CHARACTERS].encode("utf-8", "surrogatepass")
        digest.update(len(start).to_bytes(4, "big") + start)
    return digest.digest()


def nearest(replicas: Sequence[Replica], key: bytes) -> Replica:
    """Return the replica for a conversation: its first one that has less than its share of what runs.

    There is at least one, and all are able to take the request.
    """
    share = (sum(replica.outstanding for replica in replicas) + 1) / len(replicas)
    # Rounded down, since of few requests one more is much of a share; but there must be room for all.
    limit = max(math.ceil(share), math.floor(LOAD_FACTOR * share))
    order = sorted(replicas, key=lambda replica: rank(key, replica.upstream))
    return next(replica for replica in order if replica.outstanding < limit)


def rank(key: bytes, address: str) -> bytes:
    """Return what orders addresses, smallest first, differently for each `key`."""
    return blake2b(key + address.encode(), digest_size=8).digest()
