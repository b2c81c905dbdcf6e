import asyncio
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from gateway.errors import QuotaError, RateLimitError
from gateway.limits import keys as key_limits
from gateway.limits.counters import Named, SharedCounters, mark_ended
from gateway.limits.keys import KeyLimits, KeyUse
from gateway.settings import ConfigurationError
from gateway.settings.values import ApiKey
from gateway.telemetry.metrics import Place
from tests.gateway.fake_upstream import FakeUpstream, say
from tests.gateway.places import places
from tests.gateway.serving import CHAT, MESSAGES, in_process, on_socket, until

NAMED = Named(2, KeyUse.GAUGES, KeyUse.COUNTERS)
KEYS = [{"name": "narrow", "key": "one", "max_in_flight": 2}, {"name": "wide", "key": "two"}]


@pytest.fixture
def pass_time(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    now = [1000.0]
    monkeypatch.setattr(key_limits, "monotonic", lambda: now[0])

    def go_on(seconds: float) -> None:
        now[0] += seconds

    return go_on


def use(place: Place | None = None, **bounds: int) -> KeyUse:
    shared = SharedCounters(gauges=KeyUse.GAUGES, counters=KeyUse.COUNTERS, place=place)
    return KeyUse(ApiKey.model_validate({"name": "k", "key": "secret", **bounds}), shared)


def two(table: int, **bounds: int) -> tuple[KeyUse, KeyUse]:
    """Return what two processes of a gateway hold of one key."""
    first, second = (use(place, **bounds) for place in places(table))
    return first, second


def test_answers_at_once_are_bounded_and_given_back() -> None:
    key = use(max_in_flight=3)
    assert key.begin(2) == 2
    assert key.begin(1) == 1
    with pytest.raises(RateLimitError, match="has 3 answers at work or waiting, of 3") as raised:
        key.begin(1)
    assert raised.value.retry_after_s == 1
    key.end(1, 0)
    assert key.begin(1) == 1


def test_one_that_wants_more_than_there_may_be_takes_all() -> None:
    key = use(max_in_flight=3)
    assert key.begin(8) == 3
    with pytest.raises(RateLimitError):
        key.begin(1)
    key.end(3, 0)
    assert key.begin(8) == 3


def test_requests_a_minute_come_back_steadily(pass_time: Callable[[float], None]) -> None:
    key = use(requests_per_minute=3)
    for _ in range(3):
        key.begin(1)
    with pytest.raises(RateLimitError, match="3 requests a minute") as raised:
        key.begin(1)
    assert raised.value.retry_after_s == 20
    pass_time(19.5)
    with pytest.raises(RateLimitError) as raised:
        key.begin(1)
    assert raised.value.retry_after_s == 1
    pass_time(0.5)
    key.begin(1)
    pass_time(3600)
    for _ in range(3):
        key.begin(1)
    with pytest.raises(RateLimitError):
        key.begin(1)


def test_tokens_are_charged_at_the_end_with_any_excess(
    pass_time: Callable[[float], None],
) -> None:
    key = use(tokens_per_minute=600)
    key.end(key.begin(1), 599)
    key.end(key.begin(1), 301)
    with pytest.raises(RateLimitError, match="600 tokens a minute") as raised:
        key.begin(1)
    assert raised.value.retry_after_s == 31
    pass_time(31)
    key.begin(1)


def test_what_is_left_is_told_as_openai_does(pass_time: Callable[[float], None]) -> None:
    bounds = {"requests_per_minute": 30, "tokens_per_minute": 600, "tokens_per_day": 9000}
    keys = [
        ApiKey.model_validate(each)
        for each in ({"name": "a", "key": "1", **bounds}, {"name": "b", "key": "2"})
    ]
    limits = KeyLimits(keys, SharedCounters(gauges=0, counters=0, named=NAMED))
    key = limits.use_of("a")
    assert key is not None
    key.end(key.begin(1), 900)
    assert limits.headers("a") == {
        "x-ratelimit-limit-requests": "30",
        "x-ratelimit-remaining-requests": "29",
        "x-ratelimit-reset-requests": "2s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "90s",
    }
    pass_time(90)
    assert limits.headers("a")["x-ratelimit-remaining-tokens"] == "600"
    assert limits.headers("a")["x-ratelimit-reset-tokens"] == "0s"
    assert limits.headers("b") == limits.headers(None) == {}


def test_a_long_answer_saves_no_tokens_up(pass_time: Callable[[float], None]) -> None:
    key = use(tokens_per_minute=600)
    taken = key.begin(1)
    pass_time(60)
    key.end(taken, 600)
    with pytest.raises(RateLimitError, match="tokens") as raised:
        key.begin(1)
    assert raised.value.retry_after_s == 1


def test_a_refused_request_costs_nothing(pass_time: Callable[[float], None]) -> None:
    key = use(max_in_flight=1, requests_per_minute=2, tokens_per_minute=10)
    taken = key.begin(1)
    for _ in range(5):
        with pytest.raises(RateLimitError, match="at work"):
            key.begin(1)
    key.end(taken, 10)
    for _ in range(5):
        with pytest.raises(RateLimitError, match="tokens"):
            key.begin(1)
    pass_time(30)
    key.begin(1)


async def test_a_request_counts_even_if_the_gateway_is_full() -> None:
    """As with OpenAI, where unsuccessful requests count (divergence 15): sending it again and again costs."""
    go_on = asyncio.Event()

    async def answer(_request: Any) -> Any:
        async for event in say("a"):
            yield event
            await go_on.wait()

    key = {"name": "k", "key": "one", "requests_per_minute": 2}
    async with on_socket(FakeUpstream(answer), api_keys=[key], max_in_flight=1, max_waiting=0) as served:

        async def ask() -> Any:
            body = {"model": "glm", "messages": MESSAGES}
            return await served.http.post(CHAT, json=body, headers={"Authorization": "Bearer one"})

        first = asyncio.create_task(ask())
        await until(lambda: served.upstream.running == 1)
        full, *over = [await ask() for _ in range(3)]
        assert [each.status_code for each in (full, *over)] == [429] * 3
        assert "The gateway is full" in full.json()["error"]["message"]
        # Those that its own limit refused did not count: the wait is no longer for the second of them.
        assert all("2 requests a minute" in each.json()["error"]["message"] for each in over)
        assert all(int(each.headers["retry-after"]) <= 30 for each in over)
        go_on.set()
        assert (await first).status_code == 200


def test_a_key_without_bounds_has_none() -> None:
    key = use()
    for _ in range(1000):
        key.begin(100)
    key.end(100, 10**9)
    key.begin(1)


def test_processes_count_answers_together(table: int) -> None:
    one, other = two(table, max_in_flight=3)
    one.begin(2)
    other.begin(1)
    for each in (one, other):
        with pytest.raises(RateLimitError, match="has 3 answers at work or waiting, of 3"):
            each.begin(1)
    mark_ended(places(table)[0])  # and its answers with it
    other.begin(2)
    with pytest.raises(RateLimitError, match="has 3"):
        other.begin(1)


def test_processes_count_requests_and_tokens_together(table: int, pass_time: Callable[[float], None]) -> None:
    one, other = two(table, requests_per_minute=4, tokens_per_minute=600)
    for each in (one, one, other):
        each.end(each.begin(1), 100)
    one.end(one.begin(1), 0)
    for each in (one, other):
        with pytest.raises(RateLimitError, match="4 requests a minute") as raised:
            each.begin(1)
        assert raised.value.retry_after_s == 15
    pass_time(60)
    one.look()  # as `KeyLimits.follow` has it do every second
    other.end(other.begin(1), 700)
    for each in (one, other):
        with pytest.raises(RateLimitError, match="600 tokens a minute"):
            each.begin(1)


def test_a_process_that_saw_nothing_of_a_key_knows_what_the_others_took(
    table: int, pass_time: Callable[[float], None]
) -> None:
    one, other = two(table, requests_per_minute=60)
    for _ in range(60):
        one.begin(1)
    for _ in range(300):
        pass_time(1)
        one.begin(1)
    with pytest.raises(RateLimitError, match="60 requests"):
        other.begin(1)


def test_a_process_that_replaces_another_begins_with_what_is_left(
    table: int, pass_time: Callable[[float], None]
) -> None:
    one, other = two(table, requests_per_minute=60, tokens_per_minute=600)
    for tokens in (40,) * 14 + (340,):  # 300 more than there were
        one.end(one.begin(1), tokens)
    for _ in range(10):
        pass_time(1)
        other.look()
    mark_ended(places(table)[0])
    replacement = use(places(table)[0], requests_per_minute=60, tokens_per_minute=600)
    for each in (replacement, other):
        with pytest.raises(RateLimitError, match="600 tokens a minute") as raised:
            each.begin(1)
        assert raised.value.retry_after_s == 21
    pass_time(21)
    for each in (replacement, other):
        each.look()
    for each in (replacement, other) * 30:
        each.begin(1)
    for each in (replacement, other):
        with pytest.raises(RateLimitError, match="60 requests a minute"):
            each.begin(1)


async def test_keys_that_are_not_used_here_are_followed(
    table: int, pass_time: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_limits, "_LOOK_EVERY_S", 0.001)
    key = ApiKey.model_validate({"name": "k", "key": "secret", "requests_per_minute": 2})
    shared = [SharedCounters(gauges=0, counters=0, named=NAMED, place=place) for place in places(table)]
    one, other = (KeyLimits([key], each) for each in shared)
    looks = 0

    def look(use: KeyUse, _look: Any = KeyUse.look) -> None:
        nonlocal looks
        _look(use)
        looks += 1

    monkeypatch.setattr(KeyUse, "look", look)
    pass_time(3600)
    following = asyncio.create_task(one.follow())
    await until(lambda: looks > 0)
    taken = other.use_of("k")
    taken.begin(1)
    taken.begin(1)
    with pytest.raises(RateLimitError, match="2 requests"):
        one.use_of("k").begin(1)
    following.cancel()
    await asyncio.wait({following})


def test_tokens_of_a_day_are_counted_by_all_processes_until_midnight(
    table: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [19_999 * 86_400 + 80_000.5]
    monkeypatch.setattr(key_limits, "time", lambda: now[0])
    one, other = two(table, tokens_per_day=100)
    one.end(one.begin(1), 60)
    other.end(other.begin(1), 39)
    running = one.begin(1)
    other.end(other.begin(1), 1)
    mark_ended(places(table)[1])  # what it counted stays
    with pytest.raises(QuotaError, match="100 tokens of this day") as raised:
        one.begin(1)
    assert raised.value.retry_after_s == 6_400
    now[0] += 6_400
    one.end(running, 99)
    one.end(one.begin(1), 1)
    with pytest.raises(QuotaError):
        one.begin(1)


def test_changed_limits_hold_at_once_and_what_was_used_stays_used(
    pass_time: Callable[[float], None],
) -> None:
    shared = SharedCounters(gauges=0, counters=0, named=NAMED)

    def key(**limits: int) -> ApiKey:
        return ApiKey.model_validate({"name": "k", "key": "secret", **limits})

    limits = KeyLimits([key(requests_per_minute=2)], shared)
    used = limits.use_of("k")
    assert used is not None
    used.begin(1)
    used.begin(1)
    limits.apply([key(requests_per_minute=3, max_in_flight=3)])
    assert limits.use_of("k") is used
    used.begin(1)
    with pytest.raises(RateLimitError, match="3 requests a minute"):
        used.begin(1)
    limits.apply([])
    limits.apply([key(max_in_flight=3)])  # whoever comes back has what he had
    with pytest.raises(RateLimitError, match="has 3 answers"):
        used.begin(1)
    limits.apply([key(tokens_per_minute=60)])
    used.end(3, 60)
    with pytest.raises(RateLimitError, match="60 tokens a minute"):
        used.begin(1)


def test_more_names_than_there_is_room_for_change_nothing() -> None:
    keys = [ApiKey.model_validate({"name": name, "key": name}) for name in "abc"]
    limits = KeyLimits(keys[:2], SharedCounters(gauges=0, counters=0, named=NAMED))
    with pytest.raises(ConfigurationError, match="restart the gateway"):
        limits.apply(keys)
    assert limits.use_of("b") is not None


async def test_over_http_a_key_is_told_what_it_has_left() -> None:
    keys = [{"name": "a", "key": "k" * 16, "requests_per_minute": 2}]
    async with in_process(FakeUpstream(), api_keys=keys) as served:
        told = []
        for _ in range(3):
            answer = await served.http.post(
                CHAT,
                json={"model": "glm", "messages": MESSAGES},
                headers={"Authorization": "Bearer " + "k" * 16},
            )
            told.append((answer.status_code, answer.headers["x-ratelimit-remaining-requests"]))
        assert told == [(200, "1"), (200, "0"), (429, "0")]
        assert "x-ratelimit-limit-requests" not in (await served.http.get("/health/live")).headers


async def test_over_http_a_key_has_its_models_and_its_day() -> None:
    keys = [
        {"name": "one", "key": "one", "models": ["glm"], "tokens_per_day": 1},
        {"name": "other", "key": "other", "models": ["another"]},
    ]
    async with on_socket(FakeUpstream(), api_keys=keys) as served:

        async def ask(key: str) -> Any:
            body = {"model": "glm", "messages": MESSAGES}
            return await served.http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})

        async def listed(key: str) -> list[str]:
            answer = await served.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            return [model["id"] for model in answer.json()["data"]]

        assert (await listed("one"), await listed("other")) == (["glm"], [])
        assert [(await ask(key)).status_code for key in ("one", "other")] == [200, 404]
        await served.until_idle()
        over = await ask("one")
        assert over.status_code == 429
        assert over.json()["error"]["code"] == over.json()["error"]["type"] == "insufficient_quota"
        assert 0 < int(over.headers["retry-after"]) <= 86_400


async def test_a_file_of_keys_is_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("api_keys: [{name: a, key: old-secret}, {name: b, key: other-secret}]")
    async with on_socket(FakeUpstream(), keys_file=str(path)) as served:

        async def status(key: str) -> int:
            answer = await served.http.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
            return answer.status_code

        async def changed(text: str, outcome: str, count: int) -> None:
            path.write_text(text)
            await until(lambda: served.metric("keys_file_reloads_total", outcome=outcome) == count)

        assert (await status("old-secret"), await status("other-secret")) == (200, 200)
        digests = [sha256(text.encode()).hexdigest() for text in ("old-secret", "new-secret")]
        await changed(f"api_keys: [{{name: a, sha256: {digests}}}]", "applied", 1)
        assert [await status(f"{each}-secret") for each in ("old", "new", "other")] == [200, 200, 401]
        await changed("api_keys: [{name: a, kee: new-secret}]", "refused", 1)
        await changed("api_keys: []", "refused", 2)  # and not open to everybody
        assert [await status(f"{each}-secret") for each in ("new", "other")] == [200, 401]
        await changed("api_keys: [{name: c, key: other-secret}]", "applied", 2)
        assert [await status(f"{each}-secret") for each in ("old", "new", "other")] == [401, 401, 200]
    assert "secret" not in "".join(str(record.__dict__) for record in caplog.records)


@pytest.mark.parametrize(
    "bound", ["max_in_flight", "requests_per_minute", "tokens_per_minute", "tokens_per_day"]
)
@pytest.mark.parametrize("value", [0, -1, 1.5, "many"])
def test_bounds_that_are_none(bound: str, value: Any) -> None:
    with pytest.raises(ValueError, match=bound):
        use(**{bound: value})


async def test_over_http_one_keys_bound_is_not_anothers() -> None:
    go_on = asyncio.Event()

    async def answer(_request: Any) -> Any:
        async for event in say("a", "b"):
            yield event
            await go_on.wait()

    async with on_socket(FakeUpstream(answer), api_keys=KEYS) as served:

        async def ask(key: str) -> Any:
            body = {"model": "glm", "messages": MESSAGES}
            return await served.http.post(CHAT, json=body, headers={"Authorization": f"Bearer {key}"})

        waiting = [asyncio.create_task(ask(key)) for key in ("one", "one", "two")]
        await until(lambda: served.upstream.running == 3)
        refused = await ask("one")
        assert refused.status_code == 429
        assert refused.headers["retry-after"] == "1"
        assert "This API key has 2 answers" in refused.json()["error"]["message"]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        other = asyncio.create_task(ask("two"))
        await until(lambda: served.upstream.running == 4)
        go_on.set()
        assert [(await each).status_code for each in (*waiting, other)] == [200] * 4
        await served.until_idle()
        assert (await ask("one")).status_code == 200
        # Its body was not read, and there are several models.
        assert served.metric("requests_rejected_total", model="unknown", reason="key_limit") == 1
        assert served.metric("key_requests_total", key="narrow", model="glm", status="200") == 3
        assert served.metric("key_requests_total", key="narrow", model="unknown", status="429") == 1
        assert served.metric("key_requests_total", key="wide", model="glm", status="200") == 2
        assert served.metric("key_tokens_total", key="wide", model="glm", kind="generated") > 0
        assert served.metric("key_tokens_total", key="wide", model="glm", kind="prompt") > 0
