import torch

from triton_models.engine.staging import Staging

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
