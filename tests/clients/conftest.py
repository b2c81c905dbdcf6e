"""The real stack for clients that live in an environment of their own: `make test-clients`."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

_WITH_LLAMA_INDEX = {"test_llama_index", "test_instructor"}
# Each environment has its own clients, and that of `make test` none. Where one should be and is not, no test
# runs: a failure, to pytest.
collect_ignore = [
    file.name
    for file in Path(__file__).parent.glob("test_*.py")
    if not importlib.util.find_spec("llama_index" if file.stem in _WITH_LLAMA_INDEX else "langchain_openai")
]


@pytest.fixture(scope="session")
def base_url() -> Iterator[str]:
    from tests.e2e.up_process import GOLDEN  # noqa: PLC0415 - needs what only that environment has

    yield from _serve("--model", str(GOLDEN / "chatglm3"), "--dtype", "float32")


@pytest.fixture(scope="session")
def demo_url() -> Iterator[str]:
    """The demo model, which was trained to use tools."""
    yield from _serve()


def _serve(*arguments: str) -> Iterator[str]:
    from tests.e2e.up_process import UpProcess  # noqa: PLC0415 - as above

    command = Path(os.environ["STACK_COMMAND"])  # `tritongate` of the environment that can serve
    process = UpProcess(*arguments, command=command)
    try:
        yield process.wait_ready().base_url
    finally:
        process.close()
