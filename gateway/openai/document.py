"""Parsing a request body: JSON, then a typed model, with errors that name the field.

What would change the answer is understood, or refused by name: a parameter that this server does not support
is accepted only at the value that has no effect. What cannot change the answer, or is unknown, is accepted,
and the answer names it (`Reading`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError

from gateway.errors import InvalidRequestError

M = TypeVar("M", bound=BaseModel)

_ABSENT = object()

_SHOWN_LIMIT = 100
"""How many characters of a client's own name an error repeats."""

_IGNORED_LIMIT = 16
"""How many ignored names an answer repeats."""
_NAME_LIMIT = 64


@dataclass(slots=True)
class Reading:
    """How one request's body is read, and what of it was ignored.

    Objects of the body are validated with it as their context: each removes its unknown keys and notes them
    here, without the indices of lists and at most `_IGNORED_LIMIT` in all.
    """

    strict: bool = False
    """Refuse what would be ignored."""
    model: str | None = None
    """The model of a request that names none; None: it has to name one."""
    ignored: dict[str, None] = field(default_factory=dict)
    """The names, in the order in which they were found."""

    def ignore(self, name: str) -> None:
        """Note the dotted name of a field that is ignored."""
        if len(self.ignored) < _IGNORED_LIMIT:
            shown = name if name.isascii() and name.isprintable() else ascii(name)
            self.ignored[shown[:_NAME_LIMIT].replace(",", "?")] = None


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        InvalidRequestError: not JSON, not UTF-8, nested too deeply, or not an object.
    """
    if not body:
        raise InvalidRequestError("The request has no body; a JSON object is needed.")
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise InvalidRequestError("The body is not valid JSON.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return document


def read_optional_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; without a body it is empty.

    Raises:
        InvalidRequestError: as `read_object`.
    """
    return read_object(body) if body.strip() else {}


def without_neutral(
    document: Mapping[str, Any],
    neutral: Mapping[str, Any],
    path: str = "",
    *,
    refusal: str = "is not supported by this server",
) -> dict[str, Any]:
    """Drop parameters that are not supported, where they are null or at their neutral value.

    Args:
        document: an object of the request.
        neutral: the names of such parameters, each with the value that has no effect.
        path: the dotted path of `document`, with a dot at its end, for errors.
        refusal: the error's text for other values.

    Raises:
        InvalidRequestError: one of them has another value.
    """
    kept = {}
    for name, value in document.items():
        neutral_value = neutral.get(name, _ABSENT)
        if neutral_value is _ABSENT:
            kept[name] = value
        elif value is not None and not _equal(value, neutral_value):
            only = f"; only {_show(neutral_value)} is" if neutral_value not in (None, []) else ""
            raise InvalidRequestError(f"The parameter {path}{name} {refusal}{only}.", param=path + name)
    return kept


def without_neutral_in(document: Mapping[str, Any], name: str, neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Do the same within the object `name` of `document`, if it has one.

    Raises:
        InvalidRequestError: as `without_neutral`.
    """
    inner = document.get(name)
    if not isinstance(inner, dict):
        return dict(document)
    return {**document, name: without_neutral(inner, neutral, f"{name}.")}


def validate(model: type[M], document: dict[str, Any], reading: Reading | None = None) -> M:
    """Check `document` against `model`; `reading` notes what is ignored, by default nothing is.

    Raises:
        InvalidRequestError: of the first fault; `param` is the dotted path of the field.
    """
    reading = reading or Reading(strict=True)
    if reading.model is not None and "model" in model.model_fields and document.get("model") is None:
        document = document | {"model": reading.model}
    try:
        return model.model_validate(document, context=reading)
    except ValidationError as error:
        raise _explain(error, document) from None


def _explain(error: ValidationError, document: dict[str, Any]) -> InvalidRequestError:
    """Report the fault deepest in the document: in a union, that is the branch that matched furthest."""
    faults = error.errors(include_url=False, include_input=False)
    located = [
        (path_in(document, fault["loc"], missing=fault["type"] == "missing"), fault) for fault in faults
    ]
    path, fault = max(located, key=lambda item: len(item[0]))
    dotted = ".".join(map(str, path))
    if fault["type"] == "extra_forbidden":
        return _unknown(dotted)
    if fault["type"] == "missing":
        return InvalidRequestError(f"Missing required parameter: {dotted}.", param=dotted)
    message = fault["msg"].removeprefix("Value error, ")
    return InvalidRequestError(f"{dotted}: {message}" if dotted else message, param=dotted or None)


def _unknown(path: str) -> InvalidRequestError:
    shown = path if len(path) <= _SHOWN_LIMIT else path[:_SHOWN_LIMIT] + "…"
    return InvalidRequestError(f"Unknown parameter: {shown}.", param=shown)


def path_in(document: Any, location: Sequence[int | str], *, missing: bool) -> list[int | str]:
    """Return the parts of `location` that exist in `document`: pydantic's also name branches of unions.

    Args:
        document: what was validated.
        location: pydantic's location of a fault in it.
        missing: the last part names a key that is missing.
    """
    path: list[int | str] = []
    at = document
    for part in location:
        try:
            at = at[part]
        except (LookupError, TypeError):
            continue
        path.append(part)
    if missing:
        path.append(location[-1])
    return path


def _equal(value: Any, neutral: Any) -> bool:
    # 0 == False in Python, but not in JSON.
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _show(value: Any) -> str:
    return msgspec.json.encode(value).decode()
