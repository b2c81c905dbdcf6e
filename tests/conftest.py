"""What holds for every test."""

import functools
import gc
import importlib
import os
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    # Read when triton is first imported, whoever does that first: without a GPU, kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read when torch is first imported, here and in every server of the tests: models are small, many run side
# by side, and threads that wait for their share of a small product take the processors from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example is timed: the machines that run this are shared. The examples are the same in every run, so that
# a failure is the change's and not the day's.
settings.register_profile("tritongate", deadline=None, derandomize=True)
settings.load_profile("tritongate")

# Until all tests are collected: what their modules import makes little garbage, and looking for it takes a
# sixth of the time.
gc.disable()

for _library in filter(find_spec, ("httpx", "httpx2")):  # the tests' own, and the OpenAI SDK's
    # Reading the authorities that the system trusts takes 25 ms of a processor, for each client that is made;
    # and `httpx.get` makes one, also where it is asked again and again until a server is ready.
    _create = functools.cache(importlib.import_module(_library).create_ssl_context)
    pytest.MonkeyPatch().setattr(f"{_library}._transports.default.create_ssl_context", _create)

collect_ignore = [] if os.environ.get("TEST_VLLM") else ["vllm"]
"""Those want 4 GB of packages in an environment of their own: `make test-vllm` brings them and sets this."""

_ALL_E2E = re.compile(rb"^pytestmark = (\[\s*)?pytest\.mark\.e2e\b", re.MULTILINE)

SHARED_SERVERS = (
    "up",
    "patient",
    "demo_up",
    "mix",
    "families",
    "traced",
    "fleet",
    "stock",
    "scripted",
    "foreign",
)
"""Fixtures of `tests/e2e/conftest.py`; no test there needs two of them."""


LONGEST = (
    "up",
    "demo_up",
    "mix",
    "families",
    "test_failures.py",
    "test_environment.py",
    "foreign",
    "test_replicas.py",
    "patient",
    "fleet",
    "test_stack.py",
    "test_repair.py",
)
"""Groups that take over a minute, the longest first: those that begin last are waited for."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave files out of which `-m` would take nothing: each of xdist's processes imports all that are left.

    A file that does not name the mark has no end-to-end tests; one that sets it for the module has no others.
    """
    asked = config.getoption("markexpr")
    if asked not in {"e2e", "not e2e"} or collection_path.suffix != ".py":
        return None
    text = collection_path.read_bytes()
    left_out = _ALL_E2E.search(text) if asked == "not e2e" else b"mark.e2e" not in text
    return True if left_out else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Group tests by the server that they share, others by their file: for `--dist loadgroup`.

    Each server is started once then, and not once for each of xdist's processes. Groups begin in the order of
    their first tests (`--no-loadscope-reorder`).
    """
    for item in items:
        fixtures = getattr(item, "fixturenames", ())
        own = vars(item.module) if isinstance(item, pytest.Function) else {}
        shared = [name for name in SHARED_SERVERS if name in fixtures and name not in own]
        item.add_marker(pytest.mark.xdist_group("_".join(shared) or item.path.name))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(_group(item), len(order)))


def _group(item: pytest.Item) -> str:
    mark = item.get_closest_marker("xdist_group")
    assert mark is not None
    return str(mark.args[0])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """End all fixtures with the last test of a group; its servers would idle beside the next groups' else.

    Without groups of xdist the tests come in the order of their files: servers then last until the run ends.
    """
    grouped = getattr(item.config.option, "loadgroup", False)
    if not grouped or nextitem is None or _group(item) == _group(nextitem):
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    runtestprotocol(item, nextitem=None)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what all the tests' modules brought, torch's included, out of every later garbage collection."""
    if getattr(session.config.option, "loadgroup", False):  # set in the processes of xdist only
        assert all("@" in item.nodeid for item in session.items), "pytest and pytest-xdist lost the groups"
    gc.freeze()
    gc.enable()
