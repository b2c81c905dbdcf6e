"""The tokenizer entry of our own contract (package `wire`)."""

import struct

from tritonclient.grpc import service_pb2

from gateway.dialects.base import ModelReport
from gateway.dialects.chatglm import wire_prompt
from gateway.dialects.chatglm_answer import not_understood
from gateway.generation import Conversation, PlainText
from gateway.tokenization import Tokenization, Tokens
from wire import names
from wire.history import Turn
from wire.strings import pack_strings, unpack_strings
from wire.tokenizing import Tokenizing, encode_tokenizing

_ID = struct.Struct("<q")


class ChatGLMTokenizer:
    """How tokens are asked for and read; stateless."""

    def request(self, tokenization: Tokenization, report: ModelReport) -> service_pb2.ModelInferRequest:
        """Return `tokenization` as tensors for the model that `report` is about.

        Raises:
            InvalidRequestError: the chat format cannot express the conversation.
        """
        request = service_pb2.ModelInferRequest(
            model_name=names.tokenizer_entry(tokenization.model), id=tokenization.request_id
        )
        request.inputs.add(name=names.REQUEST, datatype="BYTES", shape=(1,))
        document = encode_tokenizing(_document(tokenization, report.chat_format))
        request.raw_input_contents.append(pack_strings([document]))
        return request

    def read(self, response: service_pb2.ModelInferResponse) -> Tokens:
        """Read the response.

        Raises:
            UpstreamProtocolError: it cannot be understood.
        """
        outputs = zip(response.outputs, response.raw_output_contents, strict=False)
        raw = {tensor.name: contents for tensor, contents in outputs}
        try:
            (text,) = unpack_strings(raw[names.TEXT])
            ids = tuple(token_id for (token_id,) in _ID.iter_unpack(raw[names.INPUT_IDS]))
            strings = [each.decode() for each in unpack_strings(raw.get(names.TOKENS, b""))]
            return Tokens(
                ids=ids, text=text.decode(), strings=tuple(strings) if names.TOKENS in raw else None
            )
        except KeyError as error:
            raise not_understood(f"no output {error}") from error
        except (ValueError, struct.error) as error:
            raise not_understood(str(error)) from error


def _document(tokenization: Tokenization, chat_format: str) -> Tokenizing:
    prompt, strings = wire_prompt(tokenization.prompt, chat_format), tokenization.strings
    if isinstance(tokenization.prompt, Conversation):
        return Tokenizing(
            messages=[*prompt.history, Turn(prompt.role, prompt.text)],
            add_generation_prompt=tokenization.answer_next,
            strings=strings,
        )
    if isinstance(tokenization.prompt, PlainText):
        return Tokenizing(text=prompt.text, prefix=tokenization.prefix, strings=strings)
    return Tokenizing(ids=prompt.ids, strings=strings)
