"""The interface of each kind of repository entry: its tensors, batching, and number of responses.

`entries.py` writes `config.pbtxt` from this table, and an entry uses it to complete a configuration that
leaves these out (`serving/completion.py`). Knows nothing of what the tensors contain.
"""

import enum
from dataclasses import dataclass
from typing import Final

from wire import names

STRING: Final = "TYPE_STRING"
INT16: Final = "TYPE_INT16"
INT64: Final = "TYPE_INT64"

MAX_BATCH_SIZE: Final = 64
"""Most requests that Triton passes to one call of `execute`; the engine forms its own batches from them."""


class Contract(enum.StrEnum):
    """The tensor interface that entry `M` offers its clients; an entry can declare only one."""

    BATCHED = "batched"
    """BYTES [1, 1] on the wire; history as JSON."""
    UNBATCHED = "unbatched"
    """Shape [1]; `max_token` and `history_len` INT16."""
    CHATGLM2 = "chatglm2"
    """Shape [1]; history as a flat list q1, a1, q2, a2, ... of any length."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an entry, without the batch dimension."""

    name: str
    data_type: str
    size: int
    """Number of elements of its only dimension; -1: any number."""
    optional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What Triton must know about an entry to pass requests to it."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    max_batch_size: int = 0
    """0: requests are not batched and have no batch dimension."""
    decoupled: bool = False
    """Whether a request may get any number of responses, instead of exactly one."""


STREAM: Final = Signature(
    inputs=tuple(Tensor(name, STRING, 1) for name in (names.PROMPT, names.HISTORY, names.SAMPLING)),
    outputs=tuple(Tensor(name, STRING, 1) for name in (names.RESPONSE, names.META)),
    max_batch_size=MAX_BATCH_SIZE,
    decoupled=True,
)

TOKENIZER: Final = Signature(
    inputs=(Tensor(names.REQUEST, STRING, 1),),
    outputs=(
        Tensor(names.INPUT_IDS, INT64, -1),
        Tensor(names.ATTENTION_MASK, INT64, -1),
        Tensor(names.TEXT, STRING, 1),
        Tensor(names.TOKENS, STRING, -1),
    ),
)

_FIELD: Final = {
    Contract.BATCHED: Signature(
        inputs=(
            *(
                Tensor(name, STRING, 1)
                for name in (names.PROMPT, names.HISTORY, names.TEMPERATURE, names.MAX_TOKEN)
            ),
            Tensor(names.HISTORY_LEN, STRING, 1, optional=True),
        ),
        outputs=(Tensor(names.RESPONSE, STRING, 1), Tensor(names.HISTORY, STRING, 1)),
        max_batch_size=MAX_BATCH_SIZE,
    ),
    Contract.UNBATCHED: Signature(
        inputs=(
            *(Tensor(name, STRING, 1) for name in (names.PROMPT, names.HISTORY, names.TEMPERATURE)),
            *(Tensor(name, INT16, 1) for name in (names.MAX_TOKEN, names.HISTORY_LEN)),
        ),
        outputs=(Tensor(names.RESPONSE, STRING, 1), Tensor(names.HISTORY, STRING, 1)),
    ),
    Contract.CHATGLM2: Signature(
        inputs=(
            Tensor(names.PROMPT, STRING, 1),
            Tensor(names.HISTORY, STRING, -1),
            *(Tensor(name, STRING, 1) for name in (names.TEMPERATURE, names.MAX_TOKEN, names.HISTORY_LEN)),
        ),
        outputs=(Tensor(names.RESPONSE, STRING, 1), Tensor(names.HISTORY, STRING, -1)),
    ),
}


def field_signature(contract: Contract) -> Signature:
    """Return the signature of an entry `M` with the contract `contract`."""
    return _FIELD[contract]


def choose_contract(asked: str | None, chat_format: str | None) -> Contract:
    """Return the requested contract, or the default for `chat_format` if `asked` is None.

    Raises:
        ValueError: there is no such contract.
    """
    if asked is None:
        return Contract.CHATGLM2 if chat_format == "chatglm2" else Contract.BATCHED
    try:
        return Contract(asked)
    except ValueError:
        raise ValueError(f"{asked!r} is not a contract: {', '.join(Contract)}") from None
