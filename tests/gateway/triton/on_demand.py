"""Requests for models that are loaded on demand, and what a Triton has of them."""

from typing import Any

from gateway.core.events import Delta, Event
from tests.gateway.triton.fake_triton import FakeModel, FakeTriton, generation

IN_MEMORY = {"LOADING", "READY", "UNLOADING"}


def unloaded(triton: FakeTriton, *names: str) -> None:
    """Put models on the Triton's disk, and nothing into its memory."""
    triton.models.clear()
    triton.models.update({name: FakeModel(state="") for name in names})


def in_memory(triton: FakeTriton) -> set[str]:
    return {name for name, model in triton.models.items() if model.state in IN_MEMORY}


async def ask(pool: Any, model: str, **changes: Any) -> list[Event]:
    return [event async for event in pool.generate(generation(model=model, **changes))]


async def said(pool: Any, model: str, **changes: Any) -> str:
    events = await ask(pool, model, **changes)
    return "".join(event.text for event in events if isinstance(event, Delta))
