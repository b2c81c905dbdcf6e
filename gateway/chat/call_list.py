"""Calls in the words of other people's engines, which know grammars and no chat formats.

An answer that must consist of calls is a JSON list of them there: `[{"name": N, "arguments": {...}}, ...]`.
That is what vLLM's own server asks of models, too: https://docs.vllm.ai/en/latest/features/tool_calling/.
"""

from collections.abc import Mapping
from typing import Any, Final

from gateway.chat.value_types import NAMED, VALUES
from wire.grammar import ToolCalls

_DEFINITIONS: Final = "$defs"


def list_schema(calls: ToolCalls) -> dict[str, Any]:
    """Return the JSON schema of a list of calls.

    Each tool's schema is a definition of its own, and the references within it are to that.
    """
    definitions, items = {}, []
    for place, tool in enumerate(calls.tools):
        name = f"tool{place}"
        root = f"#/{_DEFINITIONS}/{name}"
        definitions[name] = {"type": "object", **_moved(tool.parameters, root)}
        properties = {"name": {"enum": [tool.name]}, "arguments": {"$ref": root}}
        items.append(
            {
                "type": "object",
                "properties": properties,
                "required": [*properties],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if calls.single else {}
    return {"type": "array", "minItems": 1, **most, "items": {"anyOf": items}, _DEFINITIONS: definitions}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references are to what is below `root`, where it will stand."""
    if isinstance(schema, list):
        return [_moved(each, root) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMED and isinstance(value, Mapping):
            moved[key] = {name: _moved(each, root) for name, each in value.items()}
        elif key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in VALUES else _moved(value, root)
    return moved
