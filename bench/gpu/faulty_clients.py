"""Clients that only report how a request ended: with a status, with an error in its stream, or not at all."""

import http.client
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

_OK = 200
ANSWERED = frozenset({"200", "error in the stream", *(str(status) for status in range(400, 600))})


@dataclass
class Flood:
    """How many requests ended in which way."""

    ends: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def errors(self) -> int:
        """Number of requests that were answered with an error."""
        return sum(count for end, count in self.ends.items() if end in ANSWERED - {"200"})

    def verdict(self) -> dict[str, Any]:
        """Return whether every request was answered, and the numbers of each kind of end."""
        answered = all(end in ANSWERED for end in self.ends)
        return {"ok": answered, "ends": dict(self.ends), "slowest_s": round(self.slowest_s, 1)}


class Clients:
    """Send prompts of random token ids: every other request is streamed, every third has a penalty."""

    def __init__(self, url: str, *, requests: int, prompt: int, out: int, deadline_s: float) -> None:
        self._address = urlsplit(url).netloc
        self._requests = requests
        self._prompt = prompt
        self._out = out
        self._deadline_s = deadline_s

    def ask(self, *, seed: int | None = None) -> str:
        """Send one short request; return how it ended."""
        extra = {} if seed is None else {"seed": seed}
        return self._end_of({"prompt": [5, 6, 7, 8], "max_tokens": 4, "stream": False} | extra)

    def flood(self, when_started: Callable[[], object]) -> Flood:
        """Send all requests at once; call `when_started` as soon as one of them is being answered."""
        flood, started = Flood(), threading.Event()
        numbers = random.Random(0)  # noqa: S311 - no secrets
        with ThreadPoolExecutor(self._requests) as pool:
            ends: list[Future[tuple[str, float]]] = []
            for number in range(self._requests):
                body: dict[str, Any] = {
                    "prompt": [numbers.randrange(5, 250) for _ in range(self._prompt)],
                    "max_tokens": self._out,
                    "stream": number % 2 == 0,
                    "ignore_eos": True,
                    "top_p": 0.9,
                }
                if number % 3 == 0:
                    body["frequency_penalty"] = 0.5
                ends.append(pool.submit(self._timed, body, started))
            started.wait(self._deadline_s)
            when_started()
            for each in ends:
                end, seconds = each.result()
                flood.ends[end] += 1
                flood.slowest_s = max(flood.slowest_s, seconds)
        return flood

    def _timed(self, body: dict[str, Any], started: threading.Event) -> tuple[str, float]:
        began = time.monotonic()
        return self._end_of(body, started), time.monotonic() - began

    def _end_of(self, body: dict[str, Any], started: threading.Event | None = None) -> str:
        deadline = time.monotonic() + self._deadline_s
        connection = http.client.HTTPConnection(self._address, timeout=self._deadline_s)
        try:
            payload = json.dumps({"model": "glm"} | body)
            connection.request("POST", "/v1/completions", payload, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != _OK or not body["stream"]:
                answer.read()
                return str(answer.status)
            return _end_of_stream(answer, deadline, started)
        except TimeoutError:
            return "no answer in time"
        except (OSError, http.client.HTTPException) as error:
            return type(error).__name__
        finally:
            connection.close()


def _end_of_stream(
    answer: http.client.HTTPResponse, deadline: float, started: threading.Event | None = None
) -> str:
    failed = False
    for line in answer:
        if time.monotonic() > deadline:
            return "no end in time"
        if line.startswith(b"data: [DONE]"):
            return "error in the stream" if failed else "200"
        if line.startswith(b"data: "):
            failed |= "error" in json.loads(line[len(b"data: ") :])
            if started is not None:
                started.set()
    return "cut off"
