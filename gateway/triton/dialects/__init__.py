"""Selects the dialect of a model by the names of its inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from tritonclient.grpc import service_pb2

from gateway.chat.templates import TemplateError
from gateway.chat.vocabulary import Vocabulary, VocabularyError
from gateway.errors import UpstreamProtocolError
from gateway.triton.dialects import llm_api, trtllm, trtllm_ids, vllm
from gateway.triton.dialects.base import Dialect
from gateway.triton.dialects.chatglm import CHATGLM
from gateway.triton.dialects.embeddings import plain_model
from gateway.triton.dialects.model_text import ModelText, ModelTextError
from gateway.triton.dialects.templated import templated

_FOREIGN = {
    "vllm": vllm.CONTRACT,
    "llm-api": llm_api.CONTRACT,
    "trtllm": trtllm.CONTRACT,
    "trtllm-ids": trtllm_ids.CONTRACT,
}
DIALECTS = (CHATGLM.name, *_FOREIGN)
"""The names by which a configuration may demand one."""


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
        """Return the dialect of the repository entry `entry`, by what Triton says of its tensors.

        Raises:
            UpstreamProtocolError: as `choose`.
        """
        inputs = frozenset(tensor.name for tensor in metadata.inputs)
        return self.choose(entry, inputs, plain_model(metadata))

    def choose(
        self,
        entry: str,
        inputs: frozenset[str],
        plain: Callable[[Vocabulary | None], Dialect] | None = None,
    ) -> Dialect:
        """Return the first dialect that needs no inputs beside these, of the repository entry `entry`.

        `plain` makes its dialect where it is a plain embedding model (`embeddings.plain_model`).

        Reads files where the model has a tokenizer here: not for the event loop.

        Raises:
            UpstreamProtocolError: there is none, with the inputs found; or the model's tokenizer is missing.
        """
        demanded = self._demanded.get(entry)
        if demanded is not None:
            needed = CHATGLM.inputs if demanded == CHATGLM.name else _FOREIGN[demanded].inputs
            if missing := ", ".join(sorted(needed - inputs)):
                raise UpstreamProtocolError(
                    f"the model entry {entry!r} is not of the dialect {demanded}: it has no input {missing}"
                )
        if demanded in (None, CHATGLM.name) and CHATGLM.inputs <= inputs:
            model = self._text(entry)
            return CHATGLM if model.vocabulary is None else templated(model)
        for name, contract in _FOREIGN.items():
            if demanded in (None, name) and contract.inputs <= inputs:
                model = self._text(entry)
                if model.vocabulary is None and contract.needs_tokenizer(inputs):
                    raise UpstreamProtocolError(
                        f"the model entry {entry!r} counts no tokens: set `tokenizers` to {entry}=FOLDER"
                    )
                return replace(contract.dialect(inputs, model), name=name)
        if plain is not None:
            return plain(self._vocabulary(entry))
        found = ", ".join(sorted(inputs)) or "none"
        raise UpstreamProtocolError(
            f"the model entry {entry!r} speaks no tensor contract known to this gateway; "
            f"its inputs are: {found}"
        )

    def _text(self, entry: str) -> ModelText:
        folder = self._tokenizers.get(entry) or self._tokenizers.get("")
        if folder is None:
            return ModelText()
        try:
            return _read(folder)
        except ModelTextError as error:
            raise UpstreamProtocolError(f"the tokenizer of {entry!r}: {error}") from None

    def _vocabulary(self, entry: str) -> Vocabulary | None:
        """Return the tokenizer of a model that has no conversations, and so needs no template."""
        folder = self._tokenizers.get(entry) or self._tokenizers.get("")
        try:
            return None if folder is None else Vocabulary.read(folder)
        except (VocabularyError, TemplateError) as error:
            raise UpstreamProtocolError(f"the tokenizer of {entry!r}: {error}") from None


@cache
def _read(folder: Path) -> ModelText:
    return ModelText.read(folder)
