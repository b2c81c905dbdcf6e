"""HTTP and gRPC in, gRPC out: the OpenAI-compatible gateway.

Never imports torch, transformers or triton_models: the gateway holds no model and no tokenizer.
"""

from functools import cache


@cache
def version() -> str:
    """Return it, as the package index would write it."""
    from importlib.metadata import version as installed_version  # noqa: PLC0415 - a tenth of a second

    return installed_version("tritongate")
