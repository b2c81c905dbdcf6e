"""What of JSON Schema would be passed over in silence, found before a schema is compiled.

llguidance refuses by name the keywords of today's drafts that it cannot enforce. The ones here it does not
know, since they are older, or does not enforce in full.
"""

from typing import Any, Final

from triton_models.errors import InvalidGrammarError
from triton_models.text.schema_keywords import check_keywords, subschemas

_UNKNOWN: Final = ("additionalItems", "extends", "disallow", "divisibleBy")


def check_schema(schema: Any, path: str = "$") -> None:
    """Hold that a schema means nothing which would be ignored.

    Raises:
        InvalidGrammarError: it does, or is broken; the message names the keyword and where it stands.
    """
    check_keywords(schema, path)
    for where, each in subschemas(schema, path):
        for keyword in _UNKNOWN:
            if keyword in each:
                raise InvalidGrammarError(f"{where}: the keyword {keyword} cannot be enforced")
        if each.get("minProperties", 0) > 1:
            # A key may come twice among those that `properties` does not name, and counts once.
            raise InvalidGrammarError(f"{where}: minProperties over 1 cannot be enforced")
