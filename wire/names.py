"""Names of models and tensors on the wire."""

STREAM_SUFFIX = "-stream"
TOKENIZER_SUFFIX = "-tokenizer"

PROMPT = "prompt"
HISTORY = "history"
SAMPLING = "sampling"
RESPONSE = "response"
META = "meta"

TEMPERATURE = "temperature"
MAX_TOKEN = "max_token"  # noqa: S105 - a tensor's name
HISTORY_LEN = "history_len"

REQUEST = "request"
INPUT_IDS = "input_ids"
ATTENTION_MASK = "attention_mask"
TEXT = "text"
TOKENS = "tokens"

URGENT_PRIORITY = 1
"""Triton's queue priority for cancels and probes: they overtake generations that wait in Triton's queue."""

DEFAULT_PRIORITY = 2
"""Triton's queue priority for generations."""

PRIORITY_LEVELS = 2


def stream_entry(model: str) -> str:
    """Return the name of the repository entry that runs `model`'s engine."""
    return model + STREAM_SUFFIX


def tokenizer_entry(model: str) -> str:
    """Return the name of the repository entry that tokenises for `model`."""
    return model + TOKENIZER_SUFFIX
