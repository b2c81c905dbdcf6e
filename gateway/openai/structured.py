"""Structured output: `response_format`, and `structured_outputs` as in vLLM.

Both are enforced while the answer is sampled, at any temperature: an answer that ends with the reason `stop`
conforms, unless one of the request's own stop strings or stop token ids ended it. Only the model side knows
which schemas and grammars can be enforced; its refusal comes back as a 400 that names the field. What regular
expressions cost is bounded here: nested repetitions multiply, and every backend pays for the product.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from itertools import chain
from typing import Annotated, Any, ClassVar, Final, Literal, Self

import msgspec
from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.core.request import Grammar
from gateway.errors import InvalidRequestError
from gateway.openai.document import Body, Items, Strict, type_of
from wire.limits import ALTERNATIVES_LIMIT, GRAMMAR_LIMIT

MAX_DEPTH = 64
"""Nesting of objects and lists in a schema, and in a call's arguments."""

REPEATS_LIMIT: Final = 50_000
"""`(a{1,1000}){1,1000}` has a million: compiled in no time, but after a few tokens of an answer too complex
to go on. 40,000, as in `(\\w{1,200} ){1,200}`, were seen to work."""

_MOST = 10**12
_TOKEN = re.compile(
    r"\\[pPxuUb]\{[^}]{0,99}\}|\\.|\[\^?\]?(?:\\.|\[:\w{1,9}:\]|[^\]\\])*+(?:\]|\Z|\\)"
    r"|\{(\d{1,18})(?:,(\d{0,18}))?\}|.",
    re.DOTALL,
)
"""An escape, a class of characters, a counted repetition, or any one character; each is found without going
back, since a client chooses the text. A class that does not end goes on to the end."""


def shallow(value: Any) -> Any:
    """Return `value`, a JSON value.

    Raises:
        PydanticCustomError: objects and lists nest deeper than `MAX_DEPTH` in it.
    """
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        containers = [
            each.values() if isinstance(each, dict) else each
            for each in level
            if isinstance(each, dict | list)
        ]
        if not containers:
            return value
        level = list(chain.from_iterable(containers))
    raise too_deep()


def too_deep() -> PydanticCustomError:
    """Return the fault of a value that nests deeper than `MAX_DEPTH`."""
    return PydanticCustomError("too_deep", f"nested deeper than {MAX_DEPTH} levels")


encode = msgspec.json.Encoder().encode

Schema = Annotated[dict[str, Any], AfterValidator(shallow)]


class JsonSchema(Strict, place="response_format.json_schema"):
    """The schema of an answer. It is enforced with `strict` and without."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z", description="bookkeeping")]
    description: Annotated[str | None, Field(description="bookkeeping: it is not shown to the model")] = None
    schema_: Annotated[Schema | None, Field(alias="schema", description="absent: any JSON object")] = None
    strict: Annotated[
        bool | None, Field(description="the schema is enforced either way, or refused where it cannot be")
    ] = None


class PlainFormat(Strict, place="response_format"):
    """Free text or, whatever the prompt says, any JSON object."""

    type: Literal["text", "json_object"]
    schema_: Annotated[
        Schema | None,
        Field(alias="schema", description="beside json_object: what it obeys, as other servers take it"),
    ] = None
    value: Annotated[Schema | None, Field(description="another name for schema")] = None

    @classmethod
    def keys_in(cls, document: dict[str, Any]) -> frozenset[str]:
        """Return the keys that have a use in `document`: free text obeys no schema."""
        return super().keys_in(document) if document.get("type") == "json_object" else frozenset({"type"})


class JsonSchemaFormat(Strict, place="response_format"):
    """JSON that obeys a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


def _tag(value: Any) -> str | None:
    return {"text": "<plain>", "json_object": "<plain>", "json_schema": "<schema>"}.get(type_of(value) or "")


BY_TYPE: Final = Discriminator(
    # The location of a fault names the branch: the tags are no keys of an object.
    _tag,
    custom_error_type="format",
    custom_error_message="an object with the type text, json_object or json_schema is needed",
)
"""Selects the format by its type."""

ResponseFormat = Annotated[
    Annotated[PlainFormat, Tag("<plain>")] | Annotated[JsonSchemaFormat, Tag("<schema>")], BY_TYPE
]


def format_grammar(
    form: PlainFormat | JsonSchemaFormat | JsonSchema | None, field: str = "response_format"
) -> Grammar | None:
    """Return the grammar of the request's `field`; None: the answer is free.

    Raises:
        InvalidRequestError: its schema is too large.
    """
    if isinstance(form, JsonSchemaFormat):
        return schema_grammar(form.json_schema.schema_, f"{field}.json_schema.schema")
    if isinstance(form, JsonSchema):
        return schema_grammar(form.schema_, f"{field}.schema")
    if form is None or form.type == "text":
        return None
    if form.schema_ is None and form.value is not None:
        return schema_grammar(form.value, f"{field}.value")
    return schema_grammar(form.schema_, field if form.schema_ is None else f"{field}.schema")


AnySchema = Schema | str
Regex = Annotated[
    str, Field(min_length=1, max_length=GRAMMAR_LIMIT, description="of the whole answer, in Rust's syntax")
]
Choice = Annotated[
    Items[Annotated[str, Field(min_length=1)]],
    Field(min_length=1, max_length=ALTERNATIVES_LIMIT, description="the answer is one of these"),
]
Rules = Annotated[
    str, Field(min_length=1, max_length=GRAMMAR_LIMIT, description="in Lark's notation or GBNF")
]


WAYS: Final = ("json", "regex", "choice", "grammar")
"""The keys of structured outputs, and what follows `guided_` in their older names."""


class StructuredOutputs(Strict, place="structured_outputs"):
    """Exactly one kind of grammar for the answer."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "disable_any_whitespace": False,
        "disable_additional_properties": False,
        "whitespace_pattern": None,
        "structural_tag": None,
    }

    json_: Annotated[AnySchema | None, Field(alias="json", description="a JSON schema, or one as text")] = (
        None
    )
    regex: Regex | None = None
    choice: Choice | None = None
    grammar_: Annotated[Rules | None, Field(alias="grammar")] = None
    json_object: Annotated[bool | None, Field(description="true: any JSON object")] = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(value is not None for value in self._values()) + bool(self.json_object) != 1:
            raise PydanticCustomError(
                "one_way", f"exactly one of {', '.join(WAYS)} and json_object is needed"
            )
        return self

    def grammar(self) -> Grammar | None:
        """Return the answer's grammar.

        Raises:
            InvalidRequestError: a schema that is too large, or not JSON.
        """
        if self.json_object:
            return Grammar(kind="json_object", field="structured_outputs.json_object")
        return one_grammar(
            grammar_of(way, value, f"structured_outputs.{way}")
            for way, value in zip(WAYS, self._values(), strict=True)
        )

    def _values(self) -> tuple[Any, ...]:
        return self.json_, self.regex, self.choice, self.grammar_


_OLDER = Field(
    description="the older name of a part of structured_outputs", json_schema_extra={"deprecated": True}
)


class StructuredRequest(Body):
    """A request whose answer's text may be held to a grammar: of which there is one, its prompt may tell.

    Null means absent everywhere.
    """

    unsupported: ClassVar[Mapping[str, Any]] = {"guided_whitespace_pattern": None, "structural_tag": None}

    structured_outputs: StructuredOutputs | None = None
    guided_json: Annotated[AnySchema | None, _OLDER] = None
    guided_regex: Annotated[Regex | None, _OLDER] = None
    guided_choice: Annotated[Choice | None, _OLDER] = None
    guided_grammar: Annotated[Rules | None, _OLDER] = None

    @property
    def formatted(self) -> Grammar | None:
        """The grammar that the API's own field asks for; None: there is none."""
        return None

    @cached_property
    def grammar(self) -> Grammar | None:
        """The grammar of the answer's text, built once: a schema may be large. None: it is free.

        Raises:
            InvalidRequestError: several fields define one, or one is invalid.
        """
        return one_grammar(
            (
                self.formatted,
                self.structured_outputs.grammar() if self.structured_outputs else None,
                *(grammar_of(way, getattr(self, f"guided_{way}"), f"guided_{way}") for way in WAYS),
            )
        )


def one_grammar(grammars: Iterable[Grammar | None]) -> Grammar | None:
    """Return the only one of `grammars`; None: the answer is free.

    Raises:
        InvalidRequestError: there are several.
    """
    given = [each for each in grammars if each is not None]
    if len(given) > 1:
        raise InvalidRequestError(
            f"{given[0].field} and {given[-1].field} both say what the answer is; give one.",
            param=given[-1].field.partition(".")[0],
        )
    return given[0] if given else None


def grammar_of(way: str, value: Any, field: str) -> Grammar | None:
    """Return the grammar that `value`, the request's `field`, describes in one of the `WAYS`; None: in none.

    Raises:
        InvalidRequestError: a schema that is too large, or not JSON.
    """
    if value is None:
        return None
    if way == "regex":
        check_repeats([value], field)
        return Grammar(kind="regex", text=value, field=field)
    if way == "choice":
        return _bounded(Grammar(kind="choice", text=encode(value).decode(), field=field))
    if way == "grammar":
        return Grammar(kind="lark", text=value, field=field)
    return schema_grammar(_decoded(value, field) if isinstance(value, str) else value, field)


def schema_grammar(schema: dict[str, Any] | None, field: str) -> Grammar:
    """Return the grammar for the JSON schema `schema`, the request's `field`; without one, any JSON object's.

    Raises:
        InvalidRequestError: it is too large.
    """
    if schema is None:
        return Grammar(kind="json_object", field=field)
    check_repeats(patterns_of(schema), field)
    return _bounded(Grammar(kind="json_schema", text=encode(schema).decode(), field=field))


def _bounded(grammar: Grammar) -> Grammar:
    if len(grammar.text) > GRAMMAR_LIMIT:
        raise InvalidRequestError(
            f"{grammar.field} has {len(grammar.text)} characters, and at most {GRAMMAR_LIMIT} are allowed.",
            param=grammar.field,
        )
    return grammar


def _decoded(text: str, field: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        raise InvalidRequestError(f"{field} must be a JSON schema, an object.", param=field) from None


def check_repeats(patterns: Iterable[str], field: str) -> None:
    """Refuse regular expressions that repeat a part too often.

    Raises:
        InvalidRequestError: one does; `param` is `field`.
    """
    for pattern in patterns:
        if (found := repeats(pattern)) > REPEATS_LIMIT:
            raise InvalidRequestError(
                f"{field}: the repetitions of a regular expression multiply to {found},"
                f" and at most {REPEATS_LIMIT} are allowed.",
                param=field,
            )


def repeats(pattern: str) -> int:
    """Return how often the part that is repeated most may stand there; `*` and `+` count once."""
    most = last = 1
    outer: list[int] = []
    for token in _TOKEN.finditer(pattern):
        if token[0] == "(":
            outer.append(most)
            most = last = 1
        elif token[0] == ")" and outer:
            last, most = most, max(most, outer.pop())
        elif token[1] is not None:
            last = min(last * max(int(token[2] or token[1]), 1), _MOST)
            most = max(most, last)
        elif token[0] not in "*+?":
            last = 1
    return max(most, *outer, 1)


def patterns_of(schema: Any) -> Iterator[str]:
    """Yield the regular expressions in a JSON schema."""
    level = [schema]
    while level:
        each = level.pop()
        if isinstance(each, dict):
            if isinstance(pattern := each.get("pattern"), str):
                yield pattern
            if isinstance(named := each.get("patternProperties"), dict):
                yield from named
            level += each.values()
        elif isinstance(each, list):
            level += each
