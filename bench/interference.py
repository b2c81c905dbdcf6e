"""Measures what counting the tokens of long texts costs answers that stream meanwhile.

`python -m bench.interference http://127.0.0.1:8080`: 32 streamed answers, first alone, then beside clients
that have texts of a megabyte tokenized without a pause. It prints the gaps between the chunks of both.
"""

import asyncio
import json
import statistics
import time

import click
import httpx

_WARM_UP_S = 1.0
"""After which all streams run; earlier gaps belong to the prompts."""
_PHRASE = "你好世界，今天天气不错 hello world. "


@click.command()
@click.argument("url")
@click.option("--streams", default=32, show_default=True)
@click.option("--floods", default=4, show_default=True, help="clients that tokenize without a pause")
@click.option("--text-mb", default=1.0, show_default=True, help="size of a text")
@click.option("--seconds", default=10.0, show_default=True, help="for each of the two measurements")
def main(url: str, streams: int, floods: int, text_mb: float, seconds: float) -> None:
    """Print the gaps of STREAMS streamed answers of the gateway at URL, alone and beside the flood."""
    text = _PHRASE * max(1, round(text_mb * 1e6 / len(_PHRASE.encode())))
    for flood in (0, floods):
        gaps, counted = asyncio.run(_measure(url, streams, flood, text, seconds))
        gaps.sort()
        print(
            f"{streams} streams beside {flood} floods ({counted} texts): {len(gaps)} gaps, "
            f"p50 {statistics.median(gaps) * 1e3:.1f}, p99 {gaps[int(len(gaps) * 0.99)] * 1e3:.1f}, "
            f"longest {gaps[-1] * 1e3:.1f} ms",
            flush=True,
        )


async def _measure(url: str, streams: int, floods: int, text: str, seconds: float) -> tuple[list[float], int]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        begin = time.monotonic()
        gaps: list[float] = []
        counted = [0]
        work = [_stream(client, model, begin, seconds, gaps) for _ in range(streams)]
        work += [_tokenize(client, model, text, begin + seconds, counted) for _ in range(floods)]
        await asyncio.gather(*work)
        return gaps, counted[0]


async def _stream(
    client: httpx.AsyncClient, model: str, begin: float, seconds: float, gaps: list[float]
) -> None:
    while time.monotonic() < begin + seconds:
        body = {"model": model, "prompt": "Count: 1, 2, 3,", "max_tokens": 512, "ignore_eos": True}
        async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            last = None
            async for line in response.aiter_lines():
                now = time.monotonic()
                if not line.startswith("data: {"):
                    continue
                if last is not None and now > begin + _WARM_UP_S:
                    gaps.append(now - last)
                last = now
                if now > begin + seconds:
                    break


async def _tokenize(client: httpx.AsyncClient, model: str, text: str, end: float, counted: list[int]) -> None:
    body = json.dumps({"model": model, "prompt": text})
    headers = {"Content-Type": "application/json"}
    while time.monotonic() < end:
        response = await client.post("/tokenize", content=body, headers=headers)
        response.raise_for_status()
        counted[0] += 1


if __name__ == "__main__":
    main()
