"""What holds for every test of the engine, and where its compiled operations are kept meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from triton_models.engine import ops_cpu


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: on a shared machine a second thread costs more than it does."""
    torch.set_num_threads(1)


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Where a compilation is kept: nothing yet, and nothing is loaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    monkeypatch.delenv("CC", raising=False)
    ops_cpu._compiled.cache_clear()
    yield tmp_path / "caches" / "tritongate"
    ops_cpu._compiled.cache_clear()
