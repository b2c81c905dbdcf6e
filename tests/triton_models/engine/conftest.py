"""What holds for every test of the engine."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tensors here are tiny: on a shared machine a second thread costs more than it does."""
    torch.set_num_threads(1)
