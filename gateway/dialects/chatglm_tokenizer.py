"""The tokenizer entry of our own contract (package `wire`)."""

import sys
from array import array
from collections.abc import Iterator

from tritonclient.grpc import service_pb2

from gateway.dialects.base import ModelReport
from gateway.dialects.chatglm import wire_prompt
from gateway.dialects.chatglm_answer import not_understood
from gateway.generation import Conversation, PlainText, TokenIds
from gateway.tokenization import Tokenization, Tokens
from wire import names
from wire.history import Turn
from wire.strings import each_string, pack_strings, unpack_strings
from wire.tokenizing import Tokenizing, encode_tokenizing


class ChatGLMTokenizer:
    """The `TokenizerDialect` of our contract; stateless."""

    def request(self, tokenization: Tokenization, report: ModelReport) -> service_pb2.ModelInferRequest:
        """Return `tokenization` as tensors for the model that `report` is about.

        Raises:
            InvalidRequestError: the chat format cannot express the conversation.
        """
        request = service_pb2.ModelInferRequest(
            model_name=names.tokenizer_entry(tokenization.model), id=tokenization.request_id
        )
        request.inputs.add(name=names.REQUEST, datatype="BYTES", shape=(1,))
        # Ask only for what is needed: a mask, or the text again, would be as large as the ids.
        for name in _outputs(tokenization):
            request.outputs.add(name=name)
        document = encode_tokenizing(_document(tokenization, report.chat_format))
        request.raw_input_contents.append(pack_strings([document]))
        return request

    def read(self, tokenization: Tokenization, response: service_pb2.ModelInferResponse) -> Tokens:
        """Read the response to the request for `tokenization`.

        Raises:
            UpstreamProtocolError: it cannot be understood; for `strings`, while they are iterated.
        """
        outputs = zip(response.outputs, response.raw_output_contents, strict=False)
        raw = {tensor.name: contents for tensor, contents in outputs}
        if missing := [name for name in _outputs(tokenization) if name not in raw]:
            raise not_understood(f"no output {missing[0]!r}")
        try:
            if isinstance(tokenization.prompt, TokenIds):
                (text,) = unpack_strings(raw[names.TEXT])
                return Tokens(text=text.decode())
            ids = array("q", raw[names.INPUT_IDS])
        except ValueError as error:
            raise not_understood(str(error)) from error
        if sys.byteorder == "big":
            ids.byteswap()
        return Tokens(ids=ids, strings=_shown(raw[names.TOKENS]) if tokenization.strings else None)


def _outputs(tokenization: Tokenization) -> list[str]:
    """Return the names of the outputs that are needed."""
    if isinstance(tokenization.prompt, TokenIds):
        return [names.TEXT]
    return [names.INPUT_IDS, names.TOKENS] if tokenization.strings else [names.INPUT_IDS]


def _shown(raw: bytes) -> Iterator[str]:
    try:
        for each in each_string(raw):
            yield each.decode()
    except ValueError as error:
        raise not_understood(str(error)) from error


def _document(tokenization: Tokenization, chat_format: str) -> Tokenizing:
    prompt = wire_prompt(tokenization.prompt, tokenization.grammar, chat_format)
    strings = tokenization.strings
    if isinstance(tokenization.prompt, Conversation):
        return Tokenizing(
            messages=[*prompt.history, Turn(prompt.role, prompt.text)],
            add_generation_prompt=tokenization.answer_next,
            answer_metadata=prompt.answer_metadata if tokenization.answer_next else None,
            strings=strings,
        )
    if isinstance(tokenization.prompt, PlainText):
        return Tokenizing(text=prompt.text, prefix=tokenization.prefix, strings=strings)
    return Tokenizing(ids=prompt.ids, strings=strings)
