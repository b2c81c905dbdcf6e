"""Limits of one request on which both sides must agree. This module has constants only.

OpenAI's stricter limits (stop strings, names of tools) and limits on things that the wire does not know
(messages, prompts) are defined where requests are parsed.
"""

from typing import Final

INT64_MAX: Final = 2**63 - 1
"""Larger numbers fit neither into a tensor nor into a clock."""

IDS_LIMIT: Final = 2**20
"""Token ids of one prompt, or of one tokenized text: the longest context of the model family."""

ANSWERS_LIMIT: Final = 128
"""Answers to one prompt (`n`), as in OpenAI's API. The gateway can be configured with a lower limit."""

BEAMS_LIMIT: Final = 16
"""Beams of one search: each costs the engine as much as a choice does."""

STOPS_LIMIT: Final = 16
STOP_LENGTH_LIMIT: Final = 1024
"""Code points in a stop string: up to so much of an answer must be held back."""
STOP_IDS_LIMIT: Final = 128
"""Token ids that may end one answer."""

LOGIT_BIAS_LIMIT: Final = 1024
ALLOWED_IDS_LIMIT: Final = 2**16
"""Token ids that one answer may be limited to."""
BAD_WORDS_LIMIT: Final = 256
BAD_WORD_LENGTH_LIMIT: Final = 256
"""Code points in a word that an answer must not contain."""
TOP_LOGPROBS_LIMIT: Final = 20
PRIORITY_LIMIT: Final = 100
"""Priorities range from minus this to plus this."""

TOOLS_LIMIT: Final = 512
"""OpenAI takes 128; agents with several MCP servers offer more."""

GRAMMAR_LIMIT: Final = 2**18
"""Characters in a grammar's text: a schema written as JSON, a regular expression, or rules."""
ALTERNATIVES_LIMIT: Final = 1024
"""Strings in a grammar of kind `choice`."""
