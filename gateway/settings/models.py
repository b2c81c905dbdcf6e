"""How each public name is served: what of it can be set, and what names together must not say.

The setting `models` is a list of ids, each an entry served under its own name, or a mapping of public names
to what is set for them: one type for both.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import msgspec
from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic_settings import NoDecode

from gateway.settings.files import YamlModel
from gateway.settings.values import Contract, Names, Upstreams, split, tokenizer_folder
from wire.limits import INT64_MAX, STOP_LENGTH_LIMIT
from wire.sampling import Sampling

_STOPS_LIMIT = 8
"""Half of what a request may have: the other half is left to its own."""


def _known_dialect(name: str) -> str:
    # Asked for when a file is read: the dialects themselves need what is set for models.
    from gateway.triton.dialects import DIALECTS  # noqa: PLC0415

    if name not in ("auto", *DIALECTS):
        raise ValueError(f"{name!r} is no dialect; known are auto, {', '.join(DIALECTS)}")
    return name


class _Frozen(YamlModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True)


class Defaults(_Frozen):
    """Parameters of requests that set none: names and ranges are those of requests."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = Field(default=None, ge=1)

    @field_validator("*", mode="before")
    @classmethod
    def _as_in_requests(cls, value: Any, info: ValidationInfo) -> Any:
        """Check a value by the one definition of these parameters; null is none."""
        if value is None:
            return None
        try:
            sampling = msgspec.convert({info.field_name: value}, Sampling)
        except msgspec.ValidationError as error:
            raise ValueError(str(error).partition(" - at ")[0]) from None
        return getattr(sampling, info.field_name or "")

    def of_requests(self) -> dict[str, Any]:
        """Return those that stand in a request as they do here; `max_tokens` yields to the context."""
        return self.model_dump(exclude_none=True, exclude={"max_tokens"})


class Limits(_Frozen):
    """What one request may ask for; more is refused with a 400."""

    max_tokens: int | None = Field(default=None, ge=1, le=INT64_MAX, description="new tokens of each answer")
    max_prompt_tokens: int | None = Field(
        default=None, ge=1, le=INT64_MAX, description="tokens of its prompts"
    )
    n: int | None = Field(default=None, ge=1, description="answers")


class ModelSettings(_Frozen):
    """One public name: what serves it, and how."""

    entry: str = Field(min_length=1, description="Triton's name of the model; default: the public name")
    aliases: Names = ()
    adapters: Names = Field(
        default=(), description="names of LoRA adapters in its backend, each a model of that name, too"
    )
    upstreams: Upstreams = Field(default=(), description="default: those of the settings")
    dialect: Annotated[str, AfterValidator(_known_dialect)] = "auto"
    tokenizer: Annotated[str, AfterValidator(tokenizer_folder)] | None = None
    memory_gib: float | None = Field(
        default=None, gt=0, description="what it takes of a GPU when it is loaded, for max_loaded_gib"
    )
    system: str | None = Field(
        default=None, min_length=1, description="put in front of conversations without a system message"
    )
    stop: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=STOP_LENGTH_LIMIT)], ...],
        BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
        Field(max_length=_STOPS_LIMIT, description="stop strings added to those of each request"),
    ] = ()
    defaults: Defaults = Defaults()
    limits: Limits = Limits()
    keys: Names = Field(default=(), description="names of the api_keys that may use it; none: all")
    contract: Contract | None = Field(default=None, description="tensors for legacy clients")

    def open_to(self, key: str | None) -> bool:
        """Whether the owner of that key may use it; None: a caller without a key."""
        return not self.keys or key in self.keys


def _by_name(value: Any) -> Any:
    """Read ids, or what is set for public names."""
    if isinstance(value, str) and value.lstrip().startswith("{"):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("neither names nor a JSON object of what is set for each") from None
    value = split(value)
    if isinstance(value, Mapping):
        return {
            name: {"entry": name} | dict(given or {}) if isinstance(given, Mapping | None) else given
            for name, given in value.items()
        }
    if isinstance(value, list | tuple) and not any(isinstance(each, dict | list) for each in value):
        return {name: {"entry": name} for name in value}
    return value


Models = Annotated[
    Mapping[Annotated[str, Field(min_length=1)], ModelSettings], NoDecode, BeforeValidator(_by_name)
]


def public_name(models: Mapping[str, ModelSettings], name: str) -> str | None:
    """Return the public name that `name` is, has as an alias, or has as its entry; None: no model has it."""
    if name in models:
        return name
    named = (each for each, model in models.items() if name in model.aliases)
    served = (each for each, model in models.items() if name == model.entry)
    return next(named, None) or next(served, None)


def contradictions(models: Mapping[str, ModelSettings], keys: set[str] | None) -> Iterator[str]:
    """Yield what is wrong with names together, each with the model and the key.

    Args:
        models: by public name, with everything that the settings say of them.
        keys: names of the api_keys; None: any may come to be.
    """
    taken = dict.fromkeys(models, "a model")
    for name, model in models.items():
        for field, kind in (("aliases", "an alias"), ("adapters", "an adapter")):
            for each in getattr(model, field):
                if each in taken:
                    yield f"models.{name}.{field}: {each!r} is {taken[each]} already"
                taken[each] = f"{kind} of {name!r}"
        for key in model.keys:
            if keys is not None and key not in keys:
                yield f"models.{name}.keys: no api_key has the name {key!r}"
    for field in ("dialect", "tokenizer", "memory_gib"):
        first: dict[tuple[str, tuple[str, ...]], str] = {}
        for name, model in models.items():
            other = first.setdefault((model.entry, model.upstreams), name)
            if getattr(models[other], field) != getattr(model, field):
                yield f"models.{name}.{field}: not as for {other!r}, which is the same entry"
