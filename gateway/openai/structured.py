"""Structured output: `response_format`, and `structured_outputs` as in vLLM.

Both are enforced while the answer is sampled, at any temperature: an answer that ends with the reason `stop`
conforms, unless one of the request's own stop strings or stop token ids ended it. Only the model side knows
which schemas and grammars can be enforced; its refusal comes back as a 400 that names the field.
"""

from abc import ABC
from functools import cached_property
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from gateway.errors import InvalidRequestError
from gateway.generation import Generation, Grammar
from gateway.openai.generation_request import GenerationRequest, Items, Strict
from gateway.openai.schema import Schema
from wire.limits import ALTERNATIVES_LIMIT, GRAMMAR_LIMIT

_encode = msgspec.json.Encoder().encode


class JsonSchema(Strict):
    """The schema of an answer. It is enforced with `strict` and without."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}\z", description="bookkeeping")]
    description: Annotated[str | None, Field(description="bookkeeping: it is not shown to the model")] = None
    schema_: Annotated[Schema | None, Field(alias="schema", description="absent: any JSON object")] = None
    strict: Annotated[
        bool | None, Field(description="the schema is enforced either way, or refused where it cannot be")
    ] = None


class TextFormat(Strict):
    """Free text."""

    type: Literal["text"]

    def grammar(self, field: str) -> Grammar | None:
        """Return the answer's grammar; `field` is this object's name in the request."""
        del field
        return None


class JsonObjectFormat(Strict):
    """Any JSON object, whatever the prompt says."""

    type: Literal["json_object"]

    def grammar(self, field: str) -> Grammar | None:
        """Return the answer's grammar; `field` is this object's name in the request."""
        return Grammar(kind="json_object", field=field)


class JsonSchemaFormat(Strict):
    """JSON that obeys a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema

    def grammar(self, field: str) -> Grammar | None:
        """Return the answer's grammar; `field` is this object's name in the request."""
        return schema_grammar(self.json_schema.schema_, f"{field}.json_schema.schema")


def _tag(value: Any) -> str | None:
    """Return the tag of the format that `value` is, by its type."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return f"<{kind}>" if isinstance(kind, str) else None


BY_TYPE: Final = Discriminator(
    # The location of a fault names the branch, and a bare `json_schema` would look like the key of that name.
    _tag,
    custom_error_type="format",
    custom_error_message="an object with the type text, json_object or json_schema is needed",
)
"""Selects the format by its type; the tags are the types in angle brackets."""

ResponseFormat = Annotated[
    Annotated[TextFormat, Tag("<text>")]
    | Annotated[JsonObjectFormat, Tag("<json_object>")]
    | Annotated[JsonSchemaFormat, Tag("<json_schema>")],
    BY_TYPE,
]


class StructuredOutputs(Strict):
    """Exactly one kind of grammar for the answer."""

    json_: Annotated[
        Schema | str | None, Field(alias="json", description="a JSON schema, or one as text")
    ] = None
    regex: Annotated[
        str | None,
        Field(min_length=1, max_length=GRAMMAR_LIMIT, description="of the whole answer, in Rust's syntax"),
    ] = None
    choice: Annotated[
        Items[Annotated[str, Field(min_length=1)]] | None,
        Field(min_length=1, max_length=ALTERNATIVES_LIMIT, description="the answer is one of these"),
    ] = None
    grammar_: Annotated[
        str | None,
        Field(
            alias="grammar",
            min_length=1,
            max_length=GRAMMAR_LIMIT,
            description="in Lark's notation or GBNF",
        ),
    ] = None

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        ways = (self.json_, self.regex, self.choice, self.grammar_)
        if sum(way is not None for way in ways) != 1:
            raise PydanticCustomError("one_way", "exactly one of json, regex, choice and grammar is needed")
        return self

    def grammar(self, field: str) -> Grammar:
        """Return the answer's grammar; `field` is this object's name in the request.

        Raises:
            InvalidRequestError: a schema that is too large, or not JSON.
        """
        if self.regex is not None:
            return Grammar(kind="regex", text=self.regex, field=f"{field}.regex")
        if self.choice is not None:
            return _bounded(
                Grammar(kind="choice", text=_encode(self.choice).decode(), field=f"{field}.choice")
            )
        if self.grammar_ is not None:
            return Grammar(kind="lark", text=self.grammar_, field=f"{field}.grammar")
        if isinstance(self.json_, str):
            return schema_grammar(_decoded(self.json_, f"{field}.json"), f"{field}.json")
        return schema_grammar(self.json_, f"{field}.json")


def one_grammar(outputs: StructuredOutputs | None, formatted: Grammar | None, field: str) -> Grammar | None:
    """Return the grammar of an answer's text; None: it is free.

    Args:
        outputs: the request's `structured_outputs`.
        formatted: the grammar from OpenAI's own field.
        field: that field's name in the request.

    Raises:
        InvalidRequestError: both are given, or one is invalid.
    """
    if outputs is None:
        return formatted
    if formatted is not None:
        raise InvalidRequestError(
            f"{field} and structured_outputs both say what the answer is; give one.",
            param="structured_outputs",
        )
    return outputs.grammar("structured_outputs")


class StructuredRequest(GenerationRequest, ABC):
    """A request that can ask for structured output."""

    structured_outputs: StructuredOutputs | None = None

    def grammar_asked(self) -> Grammar | None:
        """Return the answer's grammar; None: it is free.

        Raises:
            InvalidRequestError: the fields about it contradict each other.
        """
        return one_grammar(self.structured_outputs, None, "")

    @cached_property
    def grammar(self) -> Grammar | None:
        """The result of `grammar_asked`, cached: a schema may be large."""
        return self.grammar_asked()

    def generation(self, *, request_id: str, deadline: float) -> Generation:
        """Return the generation to run."""
        asked = super().generation(request_id=request_id, deadline=deadline)
        return replace(asked, grammar=self.grammar)

    def check_combinations(self) -> None:
        """See `GenerationRequest.check_combinations`."""
        super().check_combinations()
        grammar = self.grammar
        if grammar is not None:
            refuse_open_ends(self, f"an answer that is held to {grammar.field}")


def refuse_open_ends(asked: GenerationRequest, answer: str) -> None:
    """Refuse options that keep an answer from ending where it is complete; `answer` describes it for errors.

    Raises:
        InvalidRequestError: the request has such an option.
    """
    for name in ("ignore_eos", "min_tokens"):
        if getattr(asked, name):
            raise InvalidRequestError(
                f"{name} contradicts {answer}, which ends where it is complete.", param=name
            )


def schema_grammar(schema: dict[str, Any] | None, field: str) -> Grammar:
    """Return the grammar for `schema`; without one, that of any JSON object.

    Args:
        schema: a JSON schema.
        field: its name in the request.

    Raises:
        InvalidRequestError: it is too large.
    """
    if schema is None:
        return Grammar(kind="json_object", field=field)
    return _bounded(Grammar(kind="json_schema", text=_encode(schema).decode(), field=field))


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
