import json
from typing import Any

import pytest

from triton_models.errors import EntryError
from triton_models.serving.completion import check_configuration, complete
from triton_models.signatures import STREAM, TOKENIZER, Contract, Signature, field_signature


class Config:
    """Triton's `ModelConfig`, as far as it is used."""

    def __init__(self, max_batch_size: int = 0) -> None:
        self.said: dict[str, Any] = {"max_batch_size": max_batch_size, "input": [], "output": []}

    def as_dict(self) -> dict[str, Any]:
        return self.said

    def add_input(self, tensor: dict[str, Any]) -> None:
        self.said["input"].append(tensor)

    def add_output(self, tensor: dict[str, Any]) -> None:
        self.said["output"].append(tensor)

    def set_max_batch_size(self, size: int) -> None:
        self.said["max_batch_size"] = size

    def set_dynamic_batching(self) -> None:
        self.said["dynamic_batching"] = {}

    def set_model_transaction_policy(self, policy: dict[str, bool]) -> None:
        self.said["model_transaction_policy"] = policy


@pytest.mark.parametrize("signature", [STREAM, TOKENIZER, *map(field_signature, Contract)])
def test_a_completed_configuration_declares_what_its_kind_takes(signature: Signature) -> None:
    said = complete(Config(), signature).as_dict()
    check_configuration(json.dumps(said), signature)
    assert [each["name"] for each in said["output"]] == [each.name for each in signature.outputs]
    assert said["max_batch_size"] == signature.max_batch_size
    assert "dynamic_batching" in said
    assert said["model_transaction_policy"] == {"decoupled": signature.decoupled}


def test_a_batch_size_of_ones_own_stays() -> None:
    assert complete(Config(max_batch_size=4), STREAM).as_dict()["max_batch_size"] == 4


def test_a_configuration_of_another_contract_is_noticed() -> None:
    batched = complete(Config(), field_signature(Contract.BATCHED)).as_dict()
    with pytest.raises(EntryError, match="history_len, max_token"):
        check_configuration(json.dumps(batched), field_signature(Contract.UNBATCHED))
    with pytest.raises(EntryError, match="max_batch_size"):
        check_configuration(json.dumps(batched | {"max_batch_size": 0}), field_signature(Contract.BATCHED))
