"""The tensors of legacy clients, which spoke to ChatGLM on Triton before there was a gateway.

A model offers one contract, since it can declare only one set of tensors. Three are of questions: they are
read and written here, whatever encoding brings them (JSON, binary data, protobuf); the other one is in
`gateway.kserve.logits`. The values come as text or, in one contract, as INT16, and are parsed strictly:
anything but a number in range is refused with an error that names the field. `max_token` limits prompt and
answer together, like `max_length` in the original code, and is itself cut to the context without an error.
Knows nothing of HTTP, gRPC or how answers are made.
"""

import itertools
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self

from gateway.chat.conversation import known_form
from gateway.errors import InvalidRequestError
from gateway.kserve.history import (
    ClientHistory,
    Reply,
    Shape,
    encode_history,
    parse_flat,
    parse_history,
)
from gateway.settings.values import Contract
from wire.history import Turn
from wire.strings import each_string, pack_strings

PROMPT: Final = "prompt"
HISTORY: Final = "history"
TEMPERATURE: Final = "temperature"
MAX_TOKEN: Final = "max_token"  # noqa: S105 - a tensor's name
HISTORY_LEN: Final = "history_len"
RESPONSE: Final = "response"

BYTES: Final = "BYTES"
INT16: Final = "INT16"
INT64: Final = "INT64"
FP32: Final = "FP32"

KEPT_ITEMS: Final = 10
"""Items of history that are used if the client does not say how many."""

HIGHEST_TEMPERATURE: Final = 2.0

MAX_ROWS: Final = 64
"""Most questions in one request."""

HEADER_LENGTH: Final = "Inference-Header-Content-Length"
"""HTTP's header that says how much of a body is JSON; binary data of tensors follow it."""

MAX_TENSORS: Final = 32
MAX_RANK: Final = 8

VERSION: Final = "1"
"""What every served model's only version is called."""

PLATFORM: Final = "tritongate"

_INTEGERS: Final = {INT16: (16, "h"), INT64: (64, "q")}
"""Of each datatype of inputs that are integers, the number of bits, and `struct`'s name."""

# The output of `str` and `repr` for Python's numbers.
_NUMBER = re.compile(rb"[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,2})?")
_INTEGER = re.compile(rb"[0-9]{1,9}")

Row = Mapping[str, Sequence[Any]]
"""One question's tensors by name, flat, as its contract declares them: strings as bytes, INT16 as int.
Optional ones may be missing."""


@dataclass(frozen=True, slots=True)
class Declared:
    """A tensor of a contract, without the batch dimension."""

    name: str
    datatype: str = BYTES
    shape: tuple[int, ...] = (1,)
    """-1: of any size."""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """A contract's tensors."""

    inputs: tuple[Declared, ...]
    outputs: tuple[Declared, ...] = (Declared(RESPONSE), Declared(HISTORY))
    max_rows: int = 0
    """0: without a batch dimension."""


SIGNATURES: Final[Mapping[Contract, Signature]] = {
    Contract.BATCHED: Signature(
        inputs=(
            *map(Declared, (PROMPT, HISTORY, TEMPERATURE, MAX_TOKEN)),
            Declared(HISTORY_LEN, optional=True),
        ),
        max_rows=MAX_ROWS,
    ),
    Contract.UNBATCHED: Signature(
        inputs=(
            *map(Declared, (PROMPT, HISTORY, TEMPERATURE)),
            Declared(MAX_TOKEN, INT16),
            Declared(HISTORY_LEN, INT16),
        ),
    ),
    Contract.FLAT: Signature(
        inputs=(
            Declared(PROMPT),
            Declared(HISTORY, shape=(-1,)),
            *map(Declared, (TEMPERATURE, MAX_TOKEN, HISTORY_LEN)),
        ),
        outputs=(Declared(RESPONSE), Declared(HISTORY, shape=(-1,))),
    ),
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as a client sends it or gets it; `values` are its elements in row-major order."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    values: "Sequence[bytes] | Sequence[int] | memoryview[float]"
    """Those of FP32 are a view, of the format `f`, of the numbers in little-endian order."""

    @classmethod
    def read(
        cls,
        name: str,
        datatype: str,
        shape: Sequence[int],
        elements: Sequence[Any] | bytes,
        *,
        path: str,
        at: str,
    ) -> Self:
        """Check an input.

        Args:
            name: the tensor's.
            datatype: as the client says.
            shape: one size may be -1; it follows from the number of elements.
            elements: the values, strings as str or bytes; or all of them as Triton serialises them.
            path: the tensor's place in the request, for errors.
            at: the place of the elements within the tensor.

        Raises:
            InvalidRequestError: the elements do not suit the datatype or the shape.
        """
        if datatype != BYTES and datatype not in _INTEGERS:
            raise wrong(f"{path}.datatype", f"only {BYTES}, {' and '.join(_INTEGERS)} are known")
        if len(shape) > MAX_RANK:
            raise wrong(f"{path}.shape", f"more than {MAX_RANK} dimensions")
        if isinstance(elements, bytes):
            elements = _unpacked(datatype, shape, elements, f"{path}.{at}")
        read: Callable[[Any, str], Any] = _read_string if datatype == BYTES else partial(_read_int, datatype)
        values = [read(value, f"{path}.{at}.{number}") for number, value in enumerate(elements)]
        return cls(name, datatype, _complete(shape, len(values), f"{path}.shape"), values)

    def packed(self) -> bytes | memoryview:
        """Return the elements as Triton serialises them: strings with a 4-byte length before each."""
        if isinstance(self.values, memoryview):
            return self.values.cast("B")
        if self.datatype in _INTEGERS:
            return struct.pack(f"<{len(self.values)}{_INTEGERS[self.datatype][1]}", *self.values)
        return pack_strings(value for value in self.values if isinstance(value, bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class InferRequest:
    """A client's request, in whichever encoding it came."""

    model: str
    inputs: Sequence[Tensor]
    outputs: Sequence[str] = ()
    """Names of the outputs to return; empty: all."""
    version: str = ""
    id: str = ""
    """Repeated in the answer."""
    timeout_us: int = 0
    """The client's own limit in microseconds; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One row of a request."""

    prompt: str
    history: ClientHistory
    """The part of the earlier conversation that is used."""
    temperature: float
    max_total_tokens: int


def contract_of(chat_format: str | None) -> Contract:
    """Return the contract that clients of models with this chat format expect."""
    return Contract.FLAT if _rounds(chat_format) else Contract.BATCHED


def _rounds(chat_format: str | None) -> bool:
    """Whether conversations of a model with this chat format are rounds of question and answer."""
    form = known_form(chat_format)
    return form is not None and form.tools is None


def config_document(model: str, signature: Signature) -> dict[str, Any]:
    """Return the model's configuration, as Triton writes it."""
    inputs, outputs = (
        [
            {
                "name": each.name,
                "data_type": "TYPE_" + ("STRING" if each.datatype == BYTES else each.datatype),
                "dims": list(each.shape),
            }
            | ({"optional": True} if each.optional else {})
            for each in tensors
        ]
        for tensors in (signature.inputs, signature.outputs)
    )
    head = {"name": model, "platform": PLATFORM, "backend": "", "max_batch_size": signature.max_rows}
    return {**head, "input": inputs, "output": outputs, "model_transaction_policy": {"decoupled": False}}


def metadata_document(model: str, signature: Signature) -> dict[str, Any]:
    """Return the model's metadata, as the KServe protocol writes it."""
    inputs, outputs = (
        [
            {"name": each.name, "datatype": each.datatype, "shape": _shape_of(signature, each)}
            for each in tensors
        ]
        for tensors in (signature.inputs, signature.outputs)
    )
    head = {"name": model, "versions": [VERSION], "platform": PLATFORM}
    return {**head, "inputs": inputs, "outputs": outputs}


def read_questions(
    contract: Contract, request: InferRequest, chat_format: str, most_rows: int = MAX_ROWS
) -> tuple[list[Question], bool]:
    """Read a request's rows.

    A client of a batched model may know it as one without a batch dimension, and then leave it out.

    Args:
        contract: the model's.
        request: the client's; the elements of each tensor are as many as its shape says.
        chat_format: the checkpoint's; where it knows only rounds, an empty history counts as one of pairs.
        most_rows: that a request may have.

    Returns:
        The questions, and whether the outputs have the batch dimension.

    Raises:
        InvalidRequestError: a tensor is missing, unknown or of another type or shape, or a value cannot be
            used; the message names the field and, of several rows, the row.
    """
    signature = SIGNATURES[contract]
    given, batch_dimension = checked_inputs(signature, request)
    rows = {len(tensor.values) for tensor in given.values()} if signature.max_rows else {1}
    if len(rows) > 1:
        raise InvalidRequestError("inputs: all must have the same number of rows.", param="inputs")
    (count,) = rows
    if not 0 < count <= most_rows:
        raise InvalidRequestError(
            f"inputs: a request has 1 to {most_rows} rows, not {count}.", param="inputs"
        )
    questions = []
    for number in range(count):
        row: Row = {
            name: tensor.values[number : number + 1] if signature.max_rows else tensor.values
            for name, tensor in given.items()
        }
        try:
            questions.append(read_question(contract, row, chat_format))
        except InvalidRequestError as error:
            if count == 1:
                raise
            raise InvalidRequestError(f"row {number}: {error.message}") from None
    return questions, batch_dimension


def write_outputs(
    contract: Contract,
    request: InferRequest,
    answers: Sequence[tuple[Question, Reply]],
    *,
    batch_dimension: bool,
) -> list[Tensor]:
    """Return the requested outputs: `response`, and `history` with the new round in the client's own form."""
    values = {
        RESPONSE: [[reply.response.encode()] for _, reply in answers],
        HISTORY: [
            encode_history(question.history.extended(Turn("user", question.prompt), reply.turns))
            for question, reply in answers
        ],
    }
    batched = bool(SIGNATURES[contract].max_rows) and batch_dimension
    outputs = []
    for name in dict.fromkeys(request.outputs) or values:
        rows = values[name]
        shape = (len(rows), 1) if batched else (len(rows[0]),)
        outputs.append(Tensor(name, BYTES, shape, [value for row in rows for value in row]))
    return outputs


def read_question(contract: Contract, row: Row, chat_format: str) -> Question:
    """Read one row.

    Raises:
        InvalidRequestError: a value cannot be used; the message names its field.
    """
    try:
        prompt = row[PROMPT][0].decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompt is not UTF-8: {error}") from None
    return Question(
        prompt=prompt,
        history=_history(contract, row, chat_format),
        temperature=_temperature(row[TEMPERATURE][0]),
        max_total_tokens=_integer(row, MAX_TOKEN, least=1),
    )


def checked_inputs(signature: Signature, request: InferRequest) -> tuple[dict[str, Tensor], bool]:
    """Return a request's inputs by name, and whether they have the batch dimension.

    Raises:
        InvalidRequestError: an input is missing, unknown or of another type or shape, or an output is
            unknown.
    """
    known = {tensor.name for tensor in signature.outputs}
    for number, name in enumerate(request.outputs):
        if name not in known:
            raise wrong(
                f"outputs.{number}.name",
                f"the model has no output {_short(name)}; it has {', '.join(sorted(known))}",
            )
    declared = {tensor.name: tensor for tensor in signature.inputs}
    given: dict[str, Tensor] = {}
    batch_dimension = True
    for number, tensor in enumerate(request.inputs):
        expected = declared.get(tensor.name)
        if expected is None:
            message = f"the model has no input {_short(tensor.name)}; it has {', '.join(declared)}"
            raise wrong(f"inputs.{number}.name", message)
        if tensor.name in given:
            raise wrong(f"inputs.{number}.name", f"{tensor.name} is there twice")
        if tensor.datatype != expected.datatype:
            message = f"{tensor.name} is {expected.datatype}, not {_short(tensor.datatype)}"
            raise wrong(f"inputs.{number}.datatype", message)
        shape = _shape_of(signature, expected)
        if signature.max_rows and len(tensor.shape) == 1:
            batch_dimension = False
            shape = shape[1:]
        if len(tensor.shape) != len(shape) or any(
            have != want for have, want in zip(tensor.shape, shape, strict=True) if want >= 0
        ):
            message = f"{tensor.name} has the shape {list(tensor.shape)}, and the model takes {shape}"
            raise wrong(f"inputs.{number}.shape", message)
        given[tensor.name] = tensor
    missing = [name for name, each in declared.items() if name not in given and not each.optional]
    if missing:
        raise InvalidRequestError(f"inputs: {', '.join(missing)} missing.", param="inputs")
    return given, batch_dimension


def _shape_of(signature: Signature, tensor: Declared) -> list[int]:
    return [-1, *tensor.shape] if signature.max_rows else [*tensor.shape]


def _history(contract: Contract, row: Row, chat_format: str) -> ClientHistory:
    """Return the part of the history that is used."""
    if contract is Contract.FLAT:
        history = parse_flat(row[HISTORY])
    else:
        history = parse_history(row[HISTORY][0], Shape.PAIRS if _rounds(chat_format) else Shape.OBJECTS)
    if HISTORY_LEN not in row:
        return history.last_items(KEPT_ITEMS)
    return history.last_rounds(_integer(row, HISTORY_LEN, least=0))


def _temperature(text: bytes) -> float:
    if _NUMBER.fullmatch(text.strip()) and (value := float(text)) <= HIGHEST_TEMPERATURE:
        return value
    raise InvalidRequestError(
        f"temperature must be a decimal number from 0 to {HIGHEST_TEMPERATURE:g}, not {_shown(text)}"
    )


def _integer(row: Row, name: str, *, least: int) -> int:
    value: bytes | int = row[name][0]
    if isinstance(value, bytes):
        if _INTEGER.fullmatch(value.strip()) and int(value) >= least:
            return int(value)
        raise InvalidRequestError(f"{name} must be a whole number of at least {least}, not {_shown(value)}")
    if value < least:
        raise InvalidRequestError(
            f"{name} must be at least {least}, not {value} (INT16 ends at 32767, and more wraps around)"
        )
    return value


def _unpacked(datatype: str, shape: Sequence[int], raw: bytes, path: str) -> Sequence[Any]:
    if datatype in _INTEGERS:
        bits, form = _INTEGERS[datatype]
        count, rest = divmod(8 * len(raw), bits)
        if rest:
            raise wrong(path, f"{len(raw)} bytes are no elements of {datatype}")
        return struct.unpack(f"<{count}{form}", raw)
    most = len(raw) if min(shape, default=1) < 0 else min(math.prod(shape), len(raw))
    try:
        return list(itertools.islice(each_string(raw), most + 1))  # a body has room for millions
    except ValueError as error:
        raise wrong(path, str(error)) from None


def _read_string(value: Any, path: str) -> bytes:
    try:
        return value if isinstance(value, bytes) else str.encode(value)
    except (TypeError, UnicodeEncodeError):
        raise wrong(path, f"an element of {BYTES} is a string of Unicode text") from None


def _read_int(datatype: str, value: Any, path: str) -> int:
    end = 2 ** (_INTEGERS[datatype][0] - 1)
    if type(value) is int and -end <= value < end:
        return value
    raise wrong(path, f"an element of {datatype} is a whole number from {-end} to {end - 1}")


def _complete(shape: Sequence[int], count: int, path: str) -> tuple[int, ...]:
    """Return `shape` with its -1, if there is one, replaced by the size for `count` elements."""
    if list(shape).count(-1) > 1:
        raise wrong(path, "only one size may be -1")
    known = math.prod(size for size in shape if size != -1)
    if -1 in shape and known > 0 and count % known == 0:
        shape = [count // known if size < 0 else size for size in shape]
    if min(shape, default=0) < 0 or math.prod(shape) != count:
        raise wrong(path, f"{list(shape)} does not hold {count} elements")
    return tuple(shape)


def wrong(path: str, message: str) -> InvalidRequestError:
    """Return the error for what is wrong at a place in a request, or with a tensor."""
    return InvalidRequestError(f"{path}: {message}.", param=path)


def _short(name: str) -> str:
    return repr(name if len(name) <= _SHOWN else name[:_SHOWN] + "…")


def _shown(text: bytes) -> str:
    return repr(text[:_SHOWN].decode(errors="replace"))


_SHOWN: Final = 40
"""How much of a client's own text an error repeats."""
