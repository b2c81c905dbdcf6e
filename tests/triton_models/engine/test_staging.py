import pytest
import torch

from triton_models.engine.staging import Staging, upload

CPU = torch.device("cpu")


def test_every_list_comes_back_by_its_name_type_and_order() -> None:
    staging = Staging()
    staging.integers("ids", [3, -1, 2**63 - 1, -(2**63)])
    staging.floats("temperatures", [0.1, 2.0, -0.0])
    staging.integers("none", [])
    staging.integers("generated", (number * number for number in range(3)))
    views = staging.upload(CPU)
    assert views["ids"].tolist() == [3, -1, 2**63 - 1, -(2**63)]
    assert views["temperatures"].tolist() == [0.1, 2.0, -0.0]
    assert views["none"].tolist() == []
    assert views["generated"].tolist() == [0, 1, 4]
    assert {name: view.dtype for name, view in views.items()} == {
        "ids": torch.int64,
        "temperatures": torch.float64,
        "none": torch.int64,
        "generated": torch.int64,
    }


def test_nothing_at_all_is_staged_as_well() -> None:
    staging = Staging()
    staging.floats("empty", [])
    assert staging.upload(CPU)["empty"].dtype == torch.float64


def test_numbers_arrive_as_they_are() -> None:
    assert upload(torch.tensor([5, -1], dtype=torch.int32), CPU).tolist() == [5, -1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_an_upload_does_not_wait_for_the_device() -> None:
    torch.cuda.set_sync_debug_mode("error")
    try:
        there = upload(torch.tensor([5, -1], dtype=torch.int32), torch.device("cuda:0"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert there.tolist() == [5, -1]
