"""A streamed answer that lasts until its client reads it, however fast the engine, or late the client."""

import asyncio
import contextlib
import re
import socket

import httpx

TOKENS = 480
"""With twenty candidates for each, some 860 KB."""

SEGMENT_BYTES = 536
"""The smallest that every path has to carry (RFC 9293, 3.7.1): the sender's buffer grows with it."""
KEPT_BYTES = 4096
"""Of what has come and nobody has read, by the kernel and by asyncio each."""


class UnreadAnswer:
    """Has begun, and its gateway cannot finish it before it is read.

    All that the gateway's buffers and the kernel's keep of it are some 300 KB.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def begin(cls, base_url: str) -> "UnreadAnswer":
        """Ask over a connection of its own."""
        body = {
            "model": "chatglm3",
            "messages": [{"role": "user", "content": "你好"}],
            "max_tokens": TOKENS,
            "ignore_eos": True,
            "logprobs": True,
            "top_logprobs": 20,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        request = httpx.Request(
            "POST", base_url + "/v1/chat/completions", json=body, headers={"Connection": "close"}
        )
        head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
        client = socket.socket()
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, SEGMENT_BYTES)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, KEPT_BYTES)
        client.settimeout(0)
        await asyncio.get_running_loop().sock_connect(client, (request.url.host, request.url.port))
        reader, writer = await asyncio.open_connection(sock=client, limit=KEPT_BYTES)
        writer.write(f"POST {request.url.path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        assert await reader.readexactly(12) == b"HTTP/1.1 200"
        return cls(reader, writer)

    async def read(self) -> int | None:
        """Read the rest; return the number of tokens that its end states, None if it has no end."""
        pieces = []
        with contextlib.suppress(ConnectionError):
            while piece := await self._reader.read(2**16):
                pieces.append(piece)
        self.close()
        usage = re.search(rb'"completion_tokens":(\d+)', b"".join(pieces))
        return int(usage[1]) if usage else None

    def close(self) -> None:
        """Hang up."""
        self._writer.close()
