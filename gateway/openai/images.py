"""Images in messages: parts of a content, each with its image in a data: URL.

The gateway fetches nothing for a client: who asks for a remote image would choose where it sends requests.
"""

import binascii
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, Field

from gateway.core.request import Image
from gateway.openai.document import AnyPart, Items, P, Strict, text_of

MEDIA_TYPE: Final = r"image/[\w.+-]+"
_DATA: Final = re.compile(rf"data:{MEDIA_TYPE};base64,")


def _data_url(url: str) -> str:
    found = _DATA.match(url)
    if found is None:
        raise ValueError(
            "images are taken as data:image/...;base64,... only; this server fetches none from elsewhere"
        )
    _checked(url[found.end() :])
    return url


def _checked(data: str) -> str:
    try:
        if binascii.a2b_base64(data, strict_mode=True):
            return data
    except (binascii.Error, ValueError):
        pass
    raise ValueError("the image is not valid base64")


Base64 = Annotated[str, AfterValidator(_checked)]
"""An image as base64."""

DataUrl = Annotated[str, AfterValidator(_data_url)]
"""An image as a data: URL."""


class ImageUrl(Strict, place="messages.content.image_url"):
    """Where an image is."""

    defaults: ClassVar[Mapping[str, Any]] = {"detail": "auto"}

    url: DataUrl


class ImagePart(Strict, place="messages.content"):
    """An image in a chat message."""

    text: ClassVar[str] = ""
    type: Literal["image_url"]
    image_url: ImageUrl

    @property
    def source(self) -> str:
        """The image as a data: URL."""
        return self.image_url.url


class InputImagePart(Strict, place="input.content"):
    """An image in a message of `/v1/responses`."""

    unsupported: ClassVar[Mapping[str, Any]] = {"file_id": None}
    defaults: ClassVar[Mapping[str, Any]] = {"detail": "auto"}

    text: ClassVar[str] = ""
    type: Literal["input_image"]
    source: Annotated[DataUrl, Field(alias="image_url")]


def joined(content: str | list[P]) -> str | list[P]:
    """Join parts of a content that are all text."""
    return content if images_of(content) else text_of(content)


Illustrated = Annotated[str | Items[P], AfterValidator(joined)]
"""A text, or parts of one; validation joins those without images."""


def images_of(content: str | Sequence[AnyPart] | None, field: str = "") -> tuple[Image, ...]:
    """Return the images of an `Illustrated` content, whose name in the request is `field`."""
    found: list[Image] = []
    length = 0
    for index, part in enumerate(() if content is None or isinstance(content, str) else content):
        if isinstance(part, ImagePart | InputImagePart):
            found.append(Image(url=part.source, at=length, field=f"{field}.{index}"))
        length += len(part.text)
    return tuple(found)
