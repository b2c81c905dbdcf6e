"""Follows files of a running gateway: a good change is passed on, a bad one refused as a whole."""

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gateway.settings import ConfigurationError, Settings, reload_keys, reload_models
from gateway.settings.files import identity

_log = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 0.5
APPLIED: Final = "applied"
REFUSED: Final = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class Followed:
    """A file with a part of the settings."""

    what: str
    field: str
    """The setting that stands in it."""
    path: Callable[[Settings], str | None]
    """None: there is none."""
    reload: Callable[[Settings], Settings]
    """Raises ConfigurationError."""
    plain: Callable[[Settings], Any]
    """The setting as JSON for the other processes, without secrets."""
    names: Callable[[Settings], Iterable[str]]


MODELS: Final = Followed(
    what="models file",
    field="models",
    path=lambda settings: settings.models_file,
    reload=reload_models,
    plain=lambda settings: settings.model_dump(mode="json", include={"models"})["models"],
    names=lambda settings: settings.models,
)
KEYS: Final = Followed(
    what="keys file",
    field="api_keys",
    path=lambda settings: settings.keys_file,
    reload=reload_keys,
    plain=lambda settings: [key.hashed().model_dump(mode="json") for key in settings.api_keys],
    names=lambda settings: [key.name for key in settings.api_keys],
)


def as_applied(settings: Settings, folder: Path) -> Settings:
    """Return the settings with the models and keys that this gateway's processes applied last.

    A process that replaces one that died must not serve what others have left behind, even if the file has
    become a bad one since.

    Args:
        settings: as they were at the start.
        folder: of this gateway's processes.
    """
    for file in (MODELS, KEYS):
        try:
            applied = json.loads((folder / f"{file.field}.json").read_bytes())
            settings = Settings(**dict(settings) | {file.field: applied})
        except (OSError, ValueError):  # nothing was applied; or a tokenizer's folder is gone
            continue
    return settings


def _keep(file: Followed, settings: Settings, folder: Path) -> None:
    new = folder / f"{file.field}.json.{os.getpid()}"
    new.write_text(json.dumps(file.plain(settings)), encoding="utf-8")
    new.replace(folder / f"{file.field}.json")


async def follow(
    file: Followed,
    settings: Settings,
    apply: Callable[[Settings], Awaitable[None]],
    tell: Callable[[str], None],
    folder: Path | None = None,
) -> None:
    """Look at a file until cancelled.

    Each process of a gateway does this by itself. The first look compares it with what is served, which may
    be older where a process replaces one that died.

    Args:
        file: which; the settings name it.
        settings: the gateway's.
        apply: makes the gateway serve by other settings.
        tell: told `applied` or `refused` after each change.
        folder: of this gateway's processes, for those that come later; None: there is one process.
    """
    path = file.path(settings) or ""
    async for _ in changes(path):
        try:
            changed = await asyncio.to_thread(file.reload, settings)
            if getattr(changed, file.field) != getattr(settings, file.field):
                await apply(changed)
                settings = changed
                if folder is not None:
                    await asyncio.to_thread(_keep, file, settings, folder)
                _log.info(
                    "%s applied", file.what, extra={"path": path, file.field: list(file.names(settings))}
                )
                tell(APPLIED)
        except ConfigurationError as error:
            _log.error(
                "%s refused: the %s stay as they were",
                file.what,
                file.what.partition(" ")[0],
                extra={"detail": str(error)},
            )
            tell(REFUSED)
        except Exception:  # noqa: BLE001 - the outermost frame of a task that nobody awaits
            _log.exception("the %s could not be applied", file.what)
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
