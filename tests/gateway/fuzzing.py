"""Requests that are made up from the gateway's own OpenAPI document, half of them wrong on purpose.

What is held of each answer: no 5xx, a documented status and content type, a body, or events, of the
documented schema, and no success for what the document rules out. What the document allows may be refused:
fields that exclude each other are not in it, and JSON Schema's integers may be written 1.0, ours not.
"""

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, given, seed
from hypothesis import settings as hypothesis_settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway.kserve.legacy import predict_body

RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
GENERATING = (
    "POST /v1/chat/completions",
    "POST /v1/completions",
    "POST /v1/responses",
    "POST /v1/messages",
)

_CHECKS: list[Any] = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]

_GRAMMARS = (
    "response_format",
    "text",
    "output_config",
    "structured_outputs",
    "guided_choice",
    "guided_regex",
    "guided_json",
    "guided_grammar",
)
"""Of these, one at most may say what an answer is."""

_OF_MESSAGES = (
    "tool_choice",
    "functions",
    "function_call",
    *_GRAMMARS,
    "add_generation_prompt",
    "chat_template_kwargs",
)
"""What a text to tokenise cannot have; a text to continue may have some of them, and does without."""

_MODEL_FIELDS = ("model", "model_name", "model_id")


def pinned(document: Mapping[str, Any], models: list[str]) -> dict[str, Any]:
    """Return an OpenAPI document in which models can only be those: requests must come further than a 404."""

    def pin(node: Any) -> Any:
        if isinstance(node, list):
            return [pin(each) for each in node]
        if not isinstance(node, dict):
            return node
        copied = {name: pin(value) for name, value in node.items()}
        for field in _MODEL_FIELDS:
            if isinstance(copied.get(field), dict) and copied[field].get("type") == "string":
                copied[field] = {"type": "string", "enum": models}
        if copied.get("name") in _MODEL_FIELDS and "schema" in copied:
            copied["schema"] = {"type": "string", "enum": models}
        return copied

    pinned_document: dict[str, Any] = pin(dict(document))
    return pinned_document


def _settle(body: dict[str, Any]) -> None:
    """Take from a body what the rest of it contradicts."""
    if not body.get("tools"):
        body.pop("tool_choice", None)
    for name in [name for name in _GRAMMARS if body.get(name)][1:]:
        del body[name]
    if isinstance(body.get("guided_json"), str):
        body["guided_json"] = "{}"


def mend(body: Any, more: Mapping[str, Any]) -> None:
    """Take from a right body what the document cannot rule out, and set `more`; else nearly all end there."""
    if not isinstance(body, dict):
        return
    _settle(body)
    if isinstance(body.get("prompt"), str):
        for name in ("messages", "tools", *_OF_MESSAGES):
            body.pop(name, None)
    elif body.keys() & {"tools", *_OF_MESSAGES}:
        body.setdefault("messages", [{"role": "user"}])
    for message in body.get("messages") or ():
        message.setdefault("content", "hi")
        message["content"] = message["content"] or "hi"
        message["role"] = "assistant" if message["role"] == "assistant" else "user"
        for name in ("tool_calls", "function_call", "tool_call_id", "name"):
            message.pop(name, None)
    if "inputs" in body:
        body |= {"inputs": predict_body()["inputs"], "outputs": [], "model_version": ""}
    body |= more


def run(
    operation: Any,
    mode: schemathesis.GenerationMode,
    *,
    cases: int,
    call: Callable[[Any], Any],
    more: Sequence[Mapping[str, Any]] = ({},),
) -> Counter[int]:
    """Ask `operation` that often, and return how often it answered which status.

    Args:
        operation: of a schemathesis schema.
        mode: `RIGHT` by the document, of which every second one is mended, or `WRONG`.
        cases: how many.
        call: sends a case.
        more: what bodies get as well where they are mended, in turns.

    Raises:
        AssertionError: an answer is not as documented.
    """
    statuses: Counter[int] = Counter()

    # With a seed and without a database: the same cases in every run and place.
    @seed(int(os.environ.get("FUZZ_SEED", "1")))
    @hypothesis_settings(
        max_examples=cases, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck)
    )
    @given(operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if case.meta.generation.mode is not mode:
            return  # without a body, where it may be left out, nothing can be wrong
        number, mended = divmod(sum(statuses.values()), 2)
        if mode is RIGHT and mended:
            mend(case.body, more[number % len(more)])
        response = call(case)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=_CHECKS)

    ask()
    return statuses
