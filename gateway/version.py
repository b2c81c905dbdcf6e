"""The version of the installed package."""

from functools import cache
from importlib.metadata import version as installed_version


@cache
def version() -> str:
    """Return it, as the package index would write it."""
    return installed_version("tritongate")
