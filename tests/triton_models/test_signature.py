from typing import Any

from triton_models import signature


class Config:
    """Triton's `ModelConfig`, as far as it is used."""

    def __init__(self, max_batch_size: int = 0) -> None:
        self.declared: dict[str, Any] = {"max_batch_size": max_batch_size, "input": [], "output": []}

    def as_dict(self) -> dict[str, Any]:
        return self.declared

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.declared["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.declared["output"].append(tensor)

    def set_max_batch_size(self, size: int) -> None:
        self.declared["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        self.declared["dynamic_batching"] = {}

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.declared["model_transaction_policy"] = policy


def test_a_completed_configuration_declares_the_interface() -> None:
    declared = signature.complete(Config()).as_dict()
    for kind, names in (("input", ["prompt", "history", "sampling"]), ("output", ["response", "meta"])):
        assert declared[kind] == [{"name": name, "data_type": "TYPE_STRING", "dims": [1]} for name in names]
    assert declared["max_batch_size"] == 64
    assert declared["dynamic_batching"] == {}
    assert declared["model_transaction_policy"] == {"decoupled": True}


def test_a_batch_size_of_ones_own_stays() -> None:
    assert signature.complete(Config(max_batch_size=4)).as_dict()["max_batch_size"] == 4
