"""Finds keywords of JSON Schema that would be silently ignored, before a schema is compiled.

llguidance itself refuses, by name, the keywords of current drafts that it cannot enforce. This module covers
the keywords that it does not know, because they are older, or does not enforce in full.
"""

from typing import Any, Final

from triton_models.errors import InvalidGrammarError
from triton_models.text.schema_keywords import check_keywords, subschemas

_UNKNOWN: Final = ("additionalItems", "extends", "disallow", "divisibleBy")


def check_schema(schema: Any, path: str = "$") -> None:
    """Check that no part of a schema would be ignored.

    Raises:
        InvalidGrammarError: a part would be ignored, or the schema is broken; the message names the keyword
            and its path.
    """
    check_keywords(schema, path)
    for where, each in subschemas(schema, path):
        for keyword in _UNKNOWN:
            if keyword in each:
                raise InvalidGrammarError(f"{where}: the keyword {keyword} cannot be enforced")
        if each.get("minProperties", 0) > 1:
            # A key that `properties` does not name may be generated twice, and then counts only once.
            raise InvalidGrammarError(f"{where}: minProperties over 1 cannot be enforced")
