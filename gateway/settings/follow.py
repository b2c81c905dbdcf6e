"""Follows files of a running gateway: a good change is passed on, a bad one refused as a whole."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Final

from gateway.settings import FILE_OF, ConfigurationError, Settings, reload
from gateway.settings.files import identity

_log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.5
APPLIED: Final = "applied"
REFUSED: Final = "refused"


def as_applied(settings: Settings, applied: Mapping[str, int]) -> Settings:
    """Return the settings with the models and keys that this gateway's processes applied last.

    A process that replaces one that died must not serve what others have left behind, even if the file has
    become a bad one since.

    Args:
        settings: as they were at the start.
        applied: descriptors of what they have kept, by name.
    """
    for name, memory in applied.items():
        try:
            line = os.pread(memory, os.fstat(memory).st_size, 0).partition(b"\n")[0]
            settings = Settings(**dict(settings) | {name: json.loads(line)})
        except (OSError, ValueError):  # nothing was applied; or a tokenizer's folder is gone
            continue
    return settings


def _keep(name: str, settings: Settings, memory: int) -> None:
    """Write what a setting is now, without secrets, for processes that come later.

    It is one line. Of two processes that write at once, one is the last; behind it is what was longer before.
    """
    hashed = settings.model_copy(update={"api_keys": tuple(key.hashed() for key in settings.api_keys)})
    os.pwrite(memory, json.dumps(hashed.model_dump(mode="json", include={name})[name]).encode() + b"\n", 0)


async def follow(
    name: str,
    settings: Settings,
    apply: Callable[[Settings], Awaitable[None]],
    tell: Callable[[str], None],
    memory: int | None = None,
) -> None:
    """Look at a file until cancelled.

    Each process of a gateway does this by itself. The first look compares it with what is served, which may
    be older where a process replaces one that died.

    Args:
        name: what stands in it: `models`, or `api_keys`.
        settings: the gateway's.
        apply: makes the gateway serve by other settings.
        tell: told `applied` or `refused` after each change.
        memory: where it is kept for processes that come later, a descriptor; None: there is one process.
    """
    path = getattr(settings, FILE_OF[name]) or ""
    what = FILE_OF[name].replace("_", " ")
    async for _ in changes(path):
        try:
            changed = await asyncio.to_thread(reload, settings, name)
            if getattr(changed, name) != getattr(settings, name):
                await apply(changed)
                settings = changed
                if memory is not None:
                    _keep(name, settings, memory)
                names = [getattr(each, "name", each) for each in getattr(settings, name)]
                _log.info("%s applied", what, extra={"path": path, name: names})
                tell(APPLIED)
        except ConfigurationError as error:
            _log.error(
                "%s refused: the %s stay as they were",
                what,
                what.partition(" ")[0],
                extra={"detail": str(error)},
            )
            tell(REFUSED)
        except Exception:  # noqa: BLE001 - the outermost frame of a task that nobody awaits
            _log.exception("the %s could not be applied", what)
            tell(REFUSED)


async def changes(*paths: str) -> AsyncIterator[None]:
    """Yield once at first, and then whenever one of these files has changed, until cancelled.

    A file that changes between two looks is still being written.
    """
    read: list[tuple[int, ...]] | None = None
    seen = read
    while True:
        before, seen = seen, await asyncio.to_thread(lambda: [identity(path) for path in paths])
        if seen != read and seen == before:
            read = seen
            yield
        await asyncio.sleep(LOOK_EVERY_S)
