"""Selects the dialect of a model by the names of its inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

from tritonclient.grpc import service_pb2

from gateway.chat.templates import TemplateError
from gateway.chat.vocabulary import Vocabulary, VocabularyError
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects import llm_api, trtllm, trtllm_ids, vllm
from gateway.triton.dialects.base import Dialect
from gateway.triton.dialects.chatglm import CHATGLM, templated
from gateway.triton.dialects.embeddings import plain_model, vector_output
from gateway.triton.dialects.model_text import ModelText

_FOREIGN = {
    "vllm": vllm.CONTRACT,
    "llm-api": llm_api.CONTRACT,
    "trtllm": trtllm.CONTRACT,
    "trtllm-ids": trtllm_ids.CONTRACT,
}
_INPUTS = {CHATGLM.name: CHATGLM.inputs} | {name: each.inputs for name, each in _FOREIGN.items()}
DIALECTS = tuple(_INPUTS)
"""The names by which a configuration may demand one."""

T = TypeVar("T")


class Dialects:
    """Makes the dialects of models.

    Args:
        tokenizers: folders with the tokenizers and chat templates of models that bring none, each as
            NAME=FOLDER; one without a name is for all others.
        demanded: names of dialects by entries, which are then taken for nothing else.
    """

    def __init__(self, tokenizers: Sequence[str] = (), demanded: Mapping[str, str] | None = None) -> None:
        self._demanded = demanded or {}
        named = (each.rpartition("=") for each in tokenizers)
        self._tokenizers = {name: Path(folder) for name, _, folder in named}

    def of(self, entry: str, metadata: service_pb2.ModelMetadataResponse) -> Dialect:
        """Return the dialect of a repository entry: the first that needs no inputs beside those it has.

        Reads files where the model has a tokenizer here: not for the event loop.

        Raises:
            UpstreamProtocolError: there is none, with the inputs found; or the model's tokenizer is missing.
        """
        inputs = frozenset(tensor.name for tensor in metadata.inputs)
        name = self._demanded.get(entry)
        if name is None:
            name = next((each for each, needed in _INPUTS.items() if needed <= inputs), None)
        elif missing := ", ".join(sorted(_INPUTS[name] - inputs)):
            raise UpstreamProtocolError(
                f"the model entry {entry!r} is not of the dialect {name}: it has no input {missing}"
            )
        if name is None:
            output = vector_output(metadata)
            if output is None:
                found = ", ".join(sorted(inputs)) or "none"
                raise UpstreamProtocolError(
                    f"the model entry {entry!r} speaks no tensor contract known to this gateway; "
                    f"its inputs are: {found}"
                )
            # It has no conversations, and so needs no template.
            vocabulary = self._read(entry, Vocabulary.read)
            if vocabulary is None:
                raise _counts_nothing(entry)
            return plain_model(metadata, output, vocabulary)
        model = self._read(entry, _model_text) or ModelText()
        if name == CHATGLM.name:
            return CHATGLM if model.vocabulary is None else templated(model)
        contract = _FOREIGN[name]
        if model.vocabulary is None and contract.needs_tokenizer(inputs):
            raise _counts_nothing(entry)
        return replace(contract.dialect(inputs, model), name=name)

    def _read(self, entry: str, read: Callable[[Path], T]) -> T | None:
        """Return what `read` makes of an entry's folder; None: there is none."""
        folder = self._tokenizers.get(entry) or self._tokenizers.get("")
        try:
            return None if folder is None else read(folder)
        except (VocabularyError, TemplateError) as error:
            raise UpstreamProtocolError(f"the tokenizer of {entry!r}: {error}") from None


def _counts_nothing(entry: str) -> UpstreamProtocolError:
    return UpstreamProtocolError(
        f"the model entry {entry!r} counts no tokens: set `tokenizers` to {entry}=FOLDER"
    )


_model_text = cache(ModelText.read)
