"""Names of a model's tensors on the wire."""

PROMPT = "prompt"
HISTORY = "history"
SAMPLING = "sampling"
RESPONSE = "response"
META = "meta"
