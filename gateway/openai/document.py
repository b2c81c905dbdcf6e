"""Request bodies: JSON, then objects of checked types, with errors that name the field.

What would change the answer is understood, or refused by name: a parameter that this server does not support
is accepted only at the value that has no effect. What cannot change the answer, or is unknown, is accepted,
and the answer names it (`Reading`).

A request waits in the gateway in this form. Objects take some twenty times the memory of their JSON, so what
nobody reads is not kept, and the parts of a text become one string.
"""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Annotated, Any, ClassVar, Protocol, Self, TypeVar

import msgspec
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.openai.wording import OBJECT_OF_TYPE, why_not_json, worded

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")

_SHOWN_LIMIT = 100
"""How many characters of a client's own name an error repeats."""

_IGNORED_LIMIT = 16
"""How many ignored names an answer repeats, and how many unknown keys of one object are looked at."""
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
    reads: frozenset[str] = frozenset()
    """The names that the chat template of its model reads, which are no advice to that model."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of fields that it leaves out, by their names."""
    ignored: dict[str, None] = field(default_factory=dict)
    """The names, in the order in which they were found."""

    @classmethod
    def of(cls, info: ValidationInfo) -> "Reading":
        """Return the reading of the body that is being validated; without one, it is strict."""
        return info.context if isinstance(info.context, Reading) else cls(strict=True)

    def ignore(self, name: str) -> None:
        """Note the dotted name of a field that is ignored."""
        if len(self.ignored) < _IGNORED_LIMIT:
            shown = name if name.isascii() and name.isprintable() else ascii(name)
            self.ignored[shown[:_NAME_LIMIT].replace(",", "?")] = None


def ignore(info: ValidationInfo, name: str) -> None:
    """Note that a value of the known field `name` has no effect.

    Raises:
        PydanticCustomError: the reading is strict.
    """
    reading = Reading.of(info)
    if reading.strict:
        raise PydanticCustomError("no_effect", "this has no effect on this server")
    reading.ignore(name)


def if_read(name: str, *variables: str) -> AfterValidator:
    """Keep a value if the model's chat template reads one of `variables`; else note that `name` is ignored.

    What asks for nothing, such as null or empty text, is dropped without a word.
    """

    def check(value: T, info: ValidationInfo) -> T | None:
        if not value or not Reading.of(info).reads.isdisjoint(variables):
            return value or None
        ignore(info, name)
        return None

    return AfterValidator(check)


def fault(name: str, message: str, kind: str = "invalid") -> ValidationError:
    """Return the fault of the key `name` of the object that is being validated.

    Pydantic's kinds `missing` and `extra_forbidden`, and `unsupported`, are always worded alike.
    """
    error = PydanticCustomError(kind, message)
    return ValidationError.from_exception_data("", [InitErrorDetails(type=error, loc=(name,), input=None)])


@cache
def _keys_of(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


class Strict(BaseModel):
    """An object of a request: its declared keys are validated without type conversion, others are ignored.

    Validated with a `Reading` as context, it notes there what it ignores; a strict one, or none, refuses it.
    """

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        # The OpenAPI document does not forbid what is ignored.
        json_schema_extra=lambda schema: schema.pop("additionalProperties"),
    )

    _place: ClassVar[str] = ""
    unsupported: ClassVar[Mapping[str, Any]] = {}
    """Keys that would change the answer and are not supported, each with the value that has no effect. Those
    of bases are among them, but for what is a field here."""
    refusals: ClassVar[Mapping[str, str]] = {}
    """Why some of them are not supported, and what to do instead; those of bases, too."""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """Keys that are ignored, each with the value that means what happens anyway and is not named."""

    def __init_subclass__(cls, *, place: str | None = None, **options: Any) -> None:
        """Let `place`, by default the base's, be where such objects stand in a request, without indices."""
        super().__init_subclass__(**options)
        if place is not None:
            cls._place = place

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Add what its bases do not support, and why."""
        inherited: list[dict[str, Any]] = []
        for kept in ("unsupported", "refusals"):
            bases = (vars(base).get(kept, {}) for base in reversed(cls.__mro__))
            inherited.append({name: each for base in bases for name, each in base.items()})
        neutral, cls.refusals = inherited
        cls.unsupported = {name: each for name, each in neutral.items() if name not in cls.model_fields}

    @classmethod
    def keys_in(cls, document: dict[str, Any]) -> frozenset[str]:
        """Return the keys that have a use in `document`."""
        del document
        return _keys_of(cls)

    @model_validator(mode="before")
    @classmethod
    def _read(cls, document: Any, info: ValidationInfo) -> Any:
        """Remove what has no effect; one unknown key stays for pydantic to refuse: there may be a million."""
        if not isinstance(document, dict):
            return document
        known = cls.keys_in(document)
        if document.keys() <= known:
            return document
        neutral = cls.unsupported
        for name, value in document.items():
            if name in neutral and not _asks_nothing(value, neutral[name]):
                refusal = cls.refusals.get(name) or f"is not supported by this server{_only(neutral[name])}"
                raise fault(name, refusal, "unsupported")
        # Null, false and what is empty ask for nothing, but where something else does.
        unknown = (
            name
            for name, value in document.items()
            if name not in known
            and name not in neutral
            and (not _asks_nothing(value, cls.defaults[name]) if name in cls.defaults else value)
        )
        reading = Reading.of(info)
        if reading.strict:
            first = next(unknown, None)
            if first in _keys_of(cls):
                raise fault(first, "it has no use here", "extra_forbidden")
            return {name: document[name] for name in (*known, first) if name in document}
        for name in islice(unknown, _IGNORED_LIMIT):
            reading.ignore(f"{cls._place}.{name}" if cls._place else name)
        return {name: document[name] for name in known if name in document}


class Body(Strict):
    """The body of a request to a model."""

    model: Annotated[str, Field(min_length=1)]

    @classmethod
    def defaulted_in(cls, document: dict[str, Any]) -> frozenset[str]:
        """Return the fields of `document` that take the model's defaults, if it leaves them out."""
        return frozenset(name for name in cls.model_fields if document.get(name) is None)

    @classmethod
    def read(cls, body: bytes, reading: Reading | None = None) -> Self:
        """Decode and check a request body; `reading` notes what of it is ignored, by default nothing is.

        Raises:
            InvalidRequestError: with the dotted path of the offending field in `param`.
        """
        request = validate(cls, read_object(body), reading)
        request.check()
        return request

    def check(self) -> None:
        """Refuse parameters that are valid alone but not together.

        Raises:
            InvalidRequestError: with the field in `param`.
        """


def type_of(value: Any) -> str | None:
    """Return the `type` of an object that may be of several; None: it has none."""
    tag = value.get("type") if isinstance(value, dict) else None
    return tag if isinstance(tag, str) else None


def branch_of(value: Any) -> str:
    """Return the tag of a union's branch by the `type` of an object.

    It is not the type alone: the path of an error would take that for the key of the same name.
    """
    return f"a {type_of(value)}"


def by_type(refusal: str, tag: Callable[[Any], str | None] = branch_of) -> Discriminator:
    """Select the branch of a union of objects by `tag`; `refusal` is what is said of other objects."""
    return Discriminator(tag, custom_error_type=OBJECT_OF_TYPE, custom_error_message=refusal)


Items = Annotated[list[T], Field(fail_fast=True)]
"""Validated up to the first fault: a body has room for millions, and only one is reported."""


def at_most(limit: int) -> BeforeValidator:
    """Refuse a larger object or list before validating its items: a body has room for many thousands."""

    def check(value: Any) -> Any:
        if isinstance(value, dict | list) and len(value) > limit:
            raise PydanticCustomError("too_many", f"at most {limit} entries are allowed")
        return value

    return BeforeValidator(check)


class AnyPart(Protocol):
    """A part of a content: with text, perhaps empty."""

    @property
    def text(self) -> str:
        """The text."""
        ...


P = TypeVar("P", bound=AnyPart)


def text_of(content: str | Sequence[AnyPart] | None) -> str:
    """Return a `Content` as one string, which it is once validated; no content is empty text."""
    return content if isinstance(content, str) else "".join(part.text for part in content or ())


Content = Annotated[str | Items[P], AfterValidator(text_of)]
"""A text, or parts of one, which validation joins."""


def lines_of(content: str | Sequence[AnyPart]) -> str:
    """Return a `Result` as one string, which it is once validated."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content if part.text)


Result = Annotated[str | Items[P], AfterValidator(lines_of)]
"""What a tool returned: a text, or texts of their own, such as each item of a list; they become lines."""

Unread = Annotated[Any, AfterValidator(lambda _: None)]
"""Any JSON value; it is dropped."""


def read_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        InvalidRequestError: not JSON, not UTF-8, nested too deeply, or not an object.
    """
    if not body:
        raise InvalidRequestError("The request has no body; a JSON object is needed.")
    body = body.removeprefix(codecs.BOM_UTF8)  # editors and PowerShell write it at the beginning of files
    try:
        try:
            document = msgspec.json.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise InvalidRequestError(f"The body is not valid JSON: {why_not_json(body)}.") from None
    except RecursionError:
        raise InvalidRequestError("The body is nested too deeply.") from None
    if not isinstance(document, dict):
        raise InvalidRequestError("The body must be a JSON object.")
    return document


class _Named(msgspec.Struct):
    model: str | None = None


_named = msgspec.json.Decoder(_Named)


def named_model(body: bytes) -> str | None:
    """Return the model that a body names; None: none, or it cannot be read. All else is passed over."""
    try:
        return _named.decode(body.removeprefix(codecs.BOM_UTF8)).model
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def read_optional_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object; without a body it is empty.

    Raises:
        InvalidRequestError: as `read_object`.
    """
    return read_object(body) if body else {}


def validate(model: type[M], document: dict[str, Any], reading: Reading | None = None) -> M:
    """Check `document` against `model`; `reading` notes what is ignored, by default nothing is.

    Raises:
        InvalidRequestError: of the first fault; `param` is the dotted path of the field.
    """
    if reading is not None and issubclass(model, Body):
        document = _completed(document, model, reading)
    try:
        return model.model_validate(document, context=reading)
    except ValidationError as error:
        raise _explain(error, document) from None


def _completed(document: dict[str, Any], model: type[Body], reading: Reading) -> dict[str, Any]:
    """Fill in the model, and what a request leaves to the model's defaults."""
    if document.get("model") is None and reading.model is not None:
        document = document | {"model": reading.model}
    if not reading.defaults:
        return document
    open_to = model.defaulted_in(document)
    return document | {field: value for field, value in reading.defaults.items() if field in open_to}


def _explain(error: ValidationError, document: dict[str, Any]) -> InvalidRequestError:
    """Report the fault deepest in the document: in a union, that is the branch that matched furthest.

    Of equals it is rather one of a value of the right type.
    """
    faults = [
        (_path_in(document, each["loc"], missing=each["type"] == "missing"), each)
        for each in error.errors(include_url=False)
    ]
    path, deepest = max(faults, key=lambda item: (len(item[0]), not item[1]["type"].endswith("_type")))
    dotted = ".".join(map(str, path))
    # A location that goes on behind the value's own place names the branch of a union.
    branches = [each for at, each in faults if at == path and each["loc"][-1:] != tuple(path[-1:])]
    message = worded(deepest, branches if deepest in branches else ())
    match deepest["type"]:
        case "extra_forbidden":
            shown = dotted if len(dotted) <= _SHOWN_LIMIT else dotted[:_SHOWN_LIMIT] + "…"
            return InvalidRequestError(f"Unknown parameter: {shown}.", param=shown)
        case "missing":
            return InvalidRequestError(f"Missing required parameter: {dotted}.", param=dotted)
        case "unsupported":
            return InvalidRequestError(f"The parameter {dotted} {message}.", param=dotted)
    return InvalidRequestError(f"{dotted}: {message}" if dotted else message, param=dotted or None)


def _path_in(document: Any, location: Sequence[int | str], *, missing: bool) -> list[int | str]:
    """Return the parts of pydantic's `location` that exist in `document`: others name branches of unions.

    With `missing`, the last part is a key that does not exist.
    """
    path: list[int | str] = []
    at = document
    for part in location[:-1] if missing else location:
        try:
            at = at[part]
        except (LookupError, TypeError):
            continue
        path.append(part)
    return [*path, location[-1]] if missing else path


def _asks_nothing(value: Any, neutral: Any) -> bool:
    if neutral is None:
        # An empty object may ask for something, such as a search with its defaults.
        return value is None or value in ("", [])
    # 0 == False in Python, but not in JSON.
    return value is None or (isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral))


def _only(neutral: Any) -> str:
    return "" if neutral in (None, []) else f"; only {msgspec.json.encode(neutral).decode()} is"
