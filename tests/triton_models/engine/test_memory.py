from pathlib import Path

import pytest
import torch

from triton_models.engine.memory import free_bytes, total_bytes

CPU = torch.device("cpu")


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("triton_models.engine.memory._CGROUP", tmp_path)
    (tmp_path / "memory.current").write_text("64\n", encoding="ascii")
    return tmp_path


def test_the_machine_has_more_than_is_free(container: Path) -> None:
    (container / "memory.max").write_text("max\n", encoding="ascii")
    assert 0 < free_bytes(CPU) < total_bytes(CPU)


def test_a_containers_limit_is_heeded(container: Path) -> None:
    (container / "memory.max").write_text("8000\n", encoding="ascii")
    assert free_bytes(CPU) == 8000 - 64
    assert total_bytes(CPU) == 8000


def test_a_full_container_has_nothing_left(container: Path) -> None:
    (container / "memory.max").write_text("8000\n", encoding="ascii")
    (container / "memory.current").write_text("9000\n", encoding="ascii")
    assert free_bytes(CPU) == 0
