from triton_models.engine.sequence import TokenLogprobs, TokenOutput
from triton_models.serving.answer import Answer
from triton_models.serving.chat_text import ChatText
from wire.meta import encode_meta
from wire.sampling import Generation


def test_what_cannot_be_sampled_has_the_floor_for_its_log_probability(text: ChatText) -> None:
    """JSON has no infinity."""
    asked = Generation(request_id="r", logprobs=1)
    answer = Answer(asked, text.tokenizer, text.answer(asked), 0)
    impossible = float("-inf")
    logprobs = TokenLogprobs(id=300, logprob=impossible, top=((300, impossible), (301, -1.5)))
    answer.take(TokenOutput(request_id="r", prompt_tokens=3, token_id=300, logprobs=logprobs))
    _, meta = answer.next_response()
    (token,) = meta.logprobs or ()
    assert token.logprob == -9999
    assert [top.logprob for top in token.top] == [-9999, -1.5]
    assert b"null" not in encode_meta(meta)
