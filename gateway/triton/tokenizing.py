"""Tokenizations on one replica's tokenizer entry."""

from gateway.dialects.registry import choose_tokenizer
from gateway.errors import InvalidRequestError, UpstreamProtocolError
from gateway.tokenization import Tokenization, Tokens
from gateway.triton.replicas import Replica
from gateway.triton.status import Fault, TritonError


async def tokenize(replica: Replica, tokenization: Tokenization) -> Tokens:
    """Run `tokenization` on the Triton of `replica`.

    Raises:
        TritonError: with any fault.
        InvalidRequestError: the model cannot express it, or has no tokenizer entry.
    """
    dialect, report = replica.serving()
    tokenizer = choose_tokenizer(dialect)
    if tokenizer is None:
        raise InvalidRequestError("The model's tokenizer cannot be asked.", param="model")
    request = tokenizer.request(tokenization, report)
    response = await replica.channel.infer(
        request, deadline=tokenization.deadline, headers=tokenization.headers
    )
    try:
        return tokenizer.read(tokenization, response)
    except UpstreamProtocolError as error:
        raise TritonError(Fault.PROTOCOL, error.message, message=error.message) from error
