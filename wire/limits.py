"""How much of a thing one request may have, where both sides must say the same. Numbers, and nothing else.

What OpenAI bounds more narrowly (stop strings, names of tools), or what the wire knows nothing of (messages,
prompts), is bounded where requests are read.
"""

from typing import Final

INT64_MAX: Final = 2**63 - 1
"""Larger numbers fit no tensor, and no clock."""

IDS_LIMIT: Final = 2**20
"""Token ids of one prompt, or of one text that is tokenised: as many as the family's longest context has."""

ANSWERS_LIMIT: Final = 128
"""Answers to one prompt, which is `n`: as OpenAI's. A setting of the gateway may be lower."""

STOPS_LIMIT: Final = 16
STOP_LENGTH_LIMIT: Final = 1024
"""Code points in a stop string: that much of an answer may have to be held back."""
STOP_IDS_LIMIT: Final = 128
"""Token ids that may end one answer."""

LOGIT_BIAS_LIMIT: Final = 1024
TOP_LOGPROBS_LIMIT: Final = 20
PRIORITY_LIMIT: Final = 100
"""On either side of 0."""

TOOLS_LIMIT: Final = 128

GRAMMAR_LIMIT: Final = 2**18
"""Characters of a grammar's text: a schema written as JSON, an expression, rules."""
ALTERNATIVES_LIMIT: Final = 1024
"""Strings of which an answer is to be one."""
