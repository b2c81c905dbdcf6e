"""Completes an entry's configuration from its signature, so that a hand-written one can be short."""

import json
from typing import Any

from triton_models.errors import EntryError
from triton_models.signatures import Signature, Tensor


def complete(config: Any, signature: Signature) -> Any:
    """Fill in what Triton's `ModelConfig` object leaves out, and return it.

    Raises:
        ValueError: raised by Triton's object: the configuration contradicts the signature.
    """
    for tensor in signature.inputs:
        config.add_input(_declared(tensor) | {"optional": tensor.optional})
    for tensor in signature.outputs:
        config.add_output(_declared(tensor))
    if signature.max_batch_size and not config.as_dict()["max_batch_size"]:
        config.set_max_batch_size(signature.max_batch_size)
    config.set_dynamic_batching()  # even without batches: its queue drops cancelled requests
    config.set_model_transaction_policy({"decoupled": signature.decoupled})
    return config


def arguments_of(config: Any, pb_utils: Any) -> dict[str, str]:
    """Return what Triton will pass to `initialize`, as far as the incomplete configuration tells."""
    declared = config.as_dict()
    folder, _, version = pb_utils.get_model_dir().rstrip("/").rpartition("/")
    return {
        "model_config": json.dumps(declared),
        "model_name": declared["name"],
        "model_repository": folder,
        "model_version": version,
        "model_instance_kind": "CPU",
    }


def check_configuration(model_config: str, signature: Signature) -> None:
    """Check that a configuration, which may be hand-written, matches the signature of the entry's kind.

    Raises:
        EntryError: it does not; the message says what differs.
    """
    declared = json.loads(model_config)
    found = {each["name"]: (each["data_type"], list(each["dims"])) for each in declared["input"]}
    wanted = {each.name: (each.data_type, [each.size]) for each in signature.inputs}
    needed = {each.name for each in signature.inputs if not each.optional}
    wrong = {name for name, what in found.items() if wanted.get(name) != what} | (needed - found.keys())
    if wrong:
        raise EntryError(
            f"config.pbtxt declares other inputs than this contract has: {', '.join(sorted(wrong))}"
        )
    if (declared["max_batch_size"] > 0) != (signature.max_batch_size > 0):
        raise EntryError("config.pbtxt's max_batch_size does not fit this contract: leave it out")


def _declared(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "data_type": tensor.data_type, "dims": [tensor.size]}
