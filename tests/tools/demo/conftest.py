"""The committed checkpoint, loaded once as it is served."""

import pytest
import torch

from tools.demo.evaluation import Responder
from tools.demo.values import CHECKPOINT


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """On a shared machine a second thread costs more than it does for so small a model."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def responder() -> Responder:
    return Responder(CHECKPOINT)
