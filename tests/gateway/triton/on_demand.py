"""Requests for models that are loaded on demand, and what a Triton has of them."""

from typing import Any

from gateway.core.events import Event
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton, generation
from tests.gateway.triton.running import collect, text

IN_MEMORY = {"LOADING", "READY", "UNLOADING"}


def unloaded(triton: FakeTriton, *names: str) -> None:
    """Put models on the Triton's disk, and nothing into its memory."""
    triton.models.clear()
    triton.models.update({name: FakeModel(state="") for name in names})


def in_memory(triton: FakeTriton) -> set[str]:
    return {name for name, model in triton.models.items() if model.state in IN_MEMORY}


async def ask(pool: Any, model: str, **changes: Any) -> list[Event]:
    return await collect(pool, generation(model=model, **changes))


async def said(pool: Any, model: str, **changes: Any) -> str:
    return text(await ask(pool, model, **changes))
