"""Limits of one request on which both sides must agree. Numbers, and nothing else.

Stricter limits of OpenAI's (stop strings, names of tools) and limits on things that the wire does not know
(messages, prompts) are defined where requests are parsed.
"""

from typing import Final

INT64_MAX: Final = 2**63 - 1
"""Larger numbers fit into no tensor and no clock."""

IDS_LIMIT: Final = 2**20
"""Token ids of one prompt, or of one tokenized text: the longest context of the model family."""

ANSWERS_LIMIT: Final = 128
"""Answers to one prompt (`n`), as in OpenAI's API. A setting of the gateway may be lower."""

STOPS_LIMIT: Final = 16
STOP_LENGTH_LIMIT: Final = 1024
"""Code points in a stop string: up to that much of an answer has to be held back."""
STOP_IDS_LIMIT: Final = 128
"""Token ids that may end one answer."""

LOGIT_BIAS_LIMIT: Final = 1024
TOP_LOGPROBS_LIMIT: Final = 20
PRIORITY_LIMIT: Final = 100
"""In both directions from 0."""

TOOLS_LIMIT: Final = 128

GRAMMAR_LIMIT: Final = 2**18
"""Characters of a grammar's text: a schema written as JSON, an expression, rules."""
ALTERNATIVES_LIMIT: Final = 1024
"""Strings in a grammar of kind `choice`."""
