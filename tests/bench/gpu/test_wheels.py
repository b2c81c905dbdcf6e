import pytest
from packaging.utils import canonicalize_name

from bench.gpu.wheels import needed, pinned


def test_everything_but_torch_is_brought_in_the_versions_of_the_constraints() -> None:
    requirements = pinned(needed("3.12"), "3.12")
    names = {line.partition("==")[0] for line in requirements}
    assert len(names) == len(requirements)
    # A dependency, a dependency's dependency, one of an extra, and what only the measuring needs.
    assert {"uvicorn", "starlette", "pyyaml", "nvidia-pytriton", "numpy", "aiohttp"} <= names
    assert not {"torch", "sympy", "gevent", "tritongate", "pytest"} & names
    assert "numpy==1.26.4" in requirements


def test_what_has_no_version_is_an_error() -> None:
    with pytest.raises(KeyError):
        pinned({canonicalize_name("no-such-thing")}, "3.12")
