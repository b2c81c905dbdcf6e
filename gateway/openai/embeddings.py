"""`/v1/embeddings`: texts, or lists of token ids, as vectors, in OpenAI's format."""

import struct
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct
from pydantic import Field, Tag

from gateway.core.upstream import Embedding, Vector
from gateway.openai.completions import BY_KIND, Ids, prompts_of
from gateway.openai.document import Body, Items
from gateway.openai.params import BOOKKEEPING
from wire.limits import INT64_MAX

INPUTS_LIMIT = 2048
"""Texts of one request, as at OpenAI."""

Text = Annotated[str, Field(min_length=1)]
Inputs = Annotated[
    Annotated[Text, Tag("text")]
    | Annotated[Ids, Tag("ids")]
    | Annotated[Items[Text], Field(min_length=1, max_length=INPUTS_LIMIT), Tag("texts")]
    | Annotated[Items[Ids], Field(min_length=1, max_length=INPUTS_LIMIT), Tag("lists")],
    BY_KIND,
]


class EmbeddingsRequest(Body):
    """A request for vectors. Null means absent everywhere."""

    unsupported: ClassVar[Mapping[str, Any]] = {
        "add_special_tokens": True,
        "embed_dtype": "float32",
        "normalize": True,
        "truncate_prompt_tokens": None,
    }

    input: Annotated[Inputs, Field(description="one text, the ids of one, or a list of either")]
    encoding_format: Annotated[
        Literal["float", "base64"] | None, Field(description="base64: of little-endian float32")
    ] = None
    endianness: Annotated[
        Literal["native", "little"] | None, Field(description="of base64, which is little-endian")
    ] = None
    dimensions: Annotated[int | None, Field(ge=1, le=INT64_MAX)] = None
    user: Annotated[str | None, BOOKKEEPING] = None

    def embeddings(self, *, request_id: str, deadline: float) -> list[Embedding]:
        """Return what is to be embedded, in order."""
        return [
            Embedding(
                request_id=request_id,
                model=self.model,
                prompt=prompt,
                deadline=deadline,
                dimensions=self.dimensions,
            )
            for prompt in prompts_of(self.input)
        ]


class EmbeddingDocument(Struct, frozen=True):
    """The vector of one input: numbers, or base64 of them as little-endian float32."""

    object: str
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(Struct, frozen=True):
    """Token counts of all inputs."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(Struct, frozen=True):
    """The vectors, in the inputs' order."""

    object: str
    data: list[EmbeddingDocument]
    model: str
    usage: EmbeddingsUsage


def embeddings_answer(request: EmbeddingsRequest, vectors: Sequence[Vector]) -> EmbeddingsAnswer:
    """Write the vectors of a request's inputs."""
    tokens = sum(vector.tokens for vector in vectors)
    return EmbeddingsAnswer(
        "list",
        [
            EmbeddingDocument("embedding", index, _written(vector, request.encoding_format))
            for index, vector in enumerate(vectors)
        ],
        request.model,
        EmbeddingsUsage(tokens, tokens),
    )


def _written(vector: Vector, form: str | None) -> list[float] | str:
    if form != "base64":
        return list(vector.values)
    return b64encode(struct.pack(f"<{len(vector.values)}f", *vector.values)).decode()
