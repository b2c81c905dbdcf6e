"""The contract of clients that choose the tokens themselves: ids in, logits out, and the tokenizer beside it.

As BLOOM and other causal models of transformers are served on Triton: `NAME` takes `input_ids` and
`attention_mask` and returns `logits`, as `forward` of `AutoModelForCausalLM` does, and `NAME_tokenizer` takes
`TEXT` and returns the former two. Rows are padded on either side, which the mask says: its ones are
contiguous. What stands where it is 0 is not read, and the logits there are 0.

Knows nothing of HTTP, gRPC or how logits are computed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gateway.core.events import LogitsPart
from gateway.errors import UpstreamProtocolError
from gateway.kserve.contracts import (
    FP32,
    INT64,
    MAX_ROWS,
    Declared,
    InferRequest,
    Signature,
    Tensor,
    checked_inputs,
    wrong,
)
from wire.limits import IDS_LIMIT

TEXT: Final = "TEXT"
INPUT_IDS: Final = "input_ids"
ATTENTION_MASK: Final = "attention_mask"
LOGITS: Final = "logits"

SUFFIX: Final = "_tokenizer"
"""What follows a model's name in that of its tokenizer."""

_FLOAT_BYTES: Final = 4
_MATRICES: Final = tuple(Declared(name, INT64, (-1, -1)) for name in (INPUT_IDS, ATTENTION_MASK))

TOKENIZER: Final = Signature(inputs=(Declared(TEXT, shape=(-1,)),), outputs=_MATRICES)


def logits_signature(vocabulary: int | None) -> Signature:
    """Return the tensors of a model with so many ids; None: it is not known how many."""
    return Signature(inputs=_MATRICES, outputs=(Declared(LOGITS, FP32, (-1, -1, vocabulary or -1)),))


@dataclass(frozen=True, slots=True)
class Prompts:
    """The rows of a request for logits."""

    ids: Sequence[tuple[int, ...]]
    """Of each row, without padding."""
    begins: Sequence[int]
    """The position at which each row's ids begin."""
    positions: int
    """Length of every row with its padding."""
    vocabulary: int

    @property
    def nbytes(self) -> int:
        """The size of all logits, those of the padding too."""
        return len(self.ids) * self.positions * self.vocabulary * _FLOAT_BYTES


def read_prompts(request: InferRequest, vocabulary: int, most_bytes: int) -> Prompts:
    """Read a request for logits of a model with `vocabulary` ids.

    Raises:
        InvalidRequestError: a tensor is missing, unknown or of another type or shape; there is no row, no id
            or no such id; a mask is none, or has a hole; or the logits would take over `most_bytes`.
    """
    given, _ = checked_inputs(logits_signature(vocabulary), request)
    ids, mask = given[INPUT_IDS], given[ATTENTION_MASK]
    if ids.shape != mask.shape:
        raise wrong(
            ATTENTION_MASK, f"its shape is {list(mask.shape)}, and that of {INPUT_IDS} {list(ids.shape)}"
        )
    rows, positions = ids.shape
    if not (0 < rows <= MAX_ROWS and positions):
        raise wrong(
            INPUT_IDS, f"a request has 1 to {MAX_ROWS} rows of at least one id, not {list(ids.shape)}"
        )
    size = rows * positions * vocabulary * _FLOAT_BYTES
    if size > most_bytes:
        raise wrong(
            INPUT_IDS,
            f"logits of {rows} x {positions} positions and {vocabulary} ids take {size} bytes, and at most "
            f"{most_bytes} are returned (the setting logits_bytes)",
        )
    prompts, begins = [], []
    for row in range(rows):
        place = slice(row * positions, (row + 1) * positions)
        begin, end = _ones(mask.values[place], row)
        found = tuple(map(int, ids.values[place][begin:end]))
        for each in (min(found), max(found)):
            if not 0 <= each < vocabulary:
                raise wrong(INPUT_IDS, f"row {row} has the id {each}, and the model has {vocabulary} ids")
        prompts.append(found)
        begins.append(begin)
    return Prompts(prompts, begins, positions, vocabulary)


def _ones(row: Sequence[object], number: int) -> tuple[int, int]:
    """Return where the ones of a mask begin and end."""
    ones = row.count(1)
    if ones + row.count(0) < len(row):
        raise wrong(ATTENTION_MASK, f"row {number} has something else than 0 and 1")
    if not ones:
        raise wrong(ATTENTION_MASK, f"row {number} has no 1: it is all padding")
    begin = row.index(1)
    if row[begin : begin + ones].count(1) < ones:
        raise wrong(ATTENTION_MASK, f"row {number} has a 0 between ones: padding is on one or both sides")
    return begin, begin + ones


class LogitsTensor:
    """Joins the logits of `prompts`, which come in parts, to one tensor; those of padding are 0."""

    def __init__(self, prompts: Prompts) -> None:
        self._prompts = prompts
        self._known = [0] * len(prompts.ids)
        """How many ids of each row have their logits."""
        self._bytes = bytearray(prompts.nbytes)

    def put(self, row: int, part: LogitsPart) -> None:
        """Add a part of a row's.

        Raises:
            UpstreamProtocolError: it does not belong there.
        """
        prompts = self._prompts
        size = prompts.vocabulary * _FLOAT_BYTES
        end = part.first + len(part.values) // size
        if (
            part.vocabulary != prompts.vocabulary
            or end > len(prompts.ids[row])
            or part.first > self._known[row]
        ):
            raise UpstreamProtocolError("The model's logits are not those of the prompt.")
        at = (row * prompts.positions + prompts.begins[row] + part.first) * size
        self._bytes[at : at + len(part.values)] = part.values
        self._known[row] = max(self._known[row], end)

    def tensor(self) -> Tensor:
        """Return all of them.

        Raises:
            UpstreamProtocolError: some have not come.
        """
        prompts = self._prompts
        if self._known != [len(ids) for ids in prompts.ids]:
            raise UpstreamProtocolError("The logits ended before they were complete.")
        shape = len(prompts.ids), prompts.positions, prompts.vocabulary
        return Tensor(LOGITS, FP32, shape, memoryview(self._bytes).cast("f"))


def read_texts(request: InferRequest) -> list[str]:
    """Read a request to tokenize.

    Raises:
        InvalidRequestError: its tensors are not those of a tokenizer, or a text is not UTF-8.
    """
    values = [
        value for value in checked_inputs(TOKENIZER, request)[0][TEXT].values if isinstance(value, bytes)
    ]
    if not 0 < len(values) <= MAX_ROWS:
        raise wrong(TEXT, f"a request has 1 to {MAX_ROWS} texts, not {len(values)}")
    texts = []
    for number, value in enumerate(values):
        try:
            texts.append(value.decode())
        except UnicodeDecodeError as error:
            raise wrong(TEXT, f"element {number} is not UTF-8: {error}") from None
    return texts


def padded(request: InferRequest, rows: Sequence[Sequence[int]], pad: int) -> list[Tensor]:
    """Return the ids of the texts, with `pad` in front of those of shorter ones, and the mask.

    Padding is on the left, so that the last position of every row is its newest token's.

    Raises:
        InvalidRequestError: with their padding they are too many.
    """
    longest = max(map(len, rows))
    if longest * len(rows) > IDS_LIMIT:
        raise wrong(
            TEXT,
            f"padded, its {len(rows)} texts come to {longest * len(rows)} ids, and at most {IDS_LIMIT} may",
        )
    values = {
        INPUT_IDS: [value for row in rows for value in (*[pad] * (longest - len(row)), *row)],
        ATTENTION_MASK: [value for row in rows for value in (*[0] * (longest - len(row)), *[1] * len(row))],
    }
    return [
        Tensor(name, INT64, (len(rows), longest), values[name])
        for name in dict.fromkeys(request.outputs) or values
    ]
