from gateway.dialects.chatglm_nudges import ChatGLMNudges
from wire import names
from wire.sampling import Probe, decode_sampling
from wire.strings import unpack_strings
from wire.tokenizing import decode_tokenizing


def test_a_nudge_is_a_probe_that_takes_no_generations_place() -> None:
    request = ChatGLMNudges().streamed("m")
    assert request.model_name == "m-stream"
    assert request.parameters["priority"].uint64_param == names.URGENT_PRIORITY
    inputs = dict(zip((each.name for each in request.inputs), request.raw_input_contents, strict=True))
    assert decode_sampling(unpack_strings(inputs[names.SAMPLING])[0]) == Probe(probe=True)


def test_a_nudge_for_a_tokenizer_asks_for_the_tokens_of_no_text() -> None:
    request = ChatGLMNudges().whole("m")
    assert request.model_name == "m-tokenizer"
    assert request.parameters["priority"].uint64_param == names.URGENT_PRIORITY
    (document,) = unpack_strings(request.raw_input_contents[0])
    assert decode_tokenizing(document).text == ""
