"""The interface of a repository entry: its tensors and batching. `entries.py` writes it into `config.pbtxt`.

Knows nothing of what the tensors contain, and imports nothing that a process without the engine lacks.
"""

from typing import Any, Final

from wire import names

INPUTS: Final = (names.PROMPT, names.HISTORY, names.SAMPLING)
OUTPUTS: Final = (names.RESPONSE, names.META)

DATA_TYPE: Final = "TYPE_STRING"
"""Of every tensor, which holds one string beside the batch dimension."""

MAX_BATCH_SIZE: Final = 64
"""Most requests that Triton passes to one call of `execute`; the engine forms its own batches from them."""


def complete(config: Any) -> Any:
    """Fill in what Triton's `ModelConfig` object leaves out, so that a hand-written one can be short.

    Raises:
        ValueError: raised by Triton's object: the configuration contradicts the interface.
    """
    for name in INPUTS:
        config.add_input({"name": name, "data_type": DATA_TYPE, "dims": [1]})
    for name in OUTPUTS:
        config.add_output({"name": name, "data_type": DATA_TYPE, "dims": [1]})
    if not config.as_dict()["max_batch_size"]:
        config.set_max_batch_size(MAX_BATCH_SIZE)
    # Without queue policy and priorities, with which Triton (2.51) leaves requests waiting. Nothing waits
    # there anyway, because `execute` never blocks: the engine's waiting list is the queue.
    config.set_dynamic_batching()
    config.set_model_transaction_policy({"decoupled": True})
    return config
