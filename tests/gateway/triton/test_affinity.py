import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest

from gateway.core.request import Conversation, Message, PlainText, Prompt, TokenIds, Tool, ToolOffer, Turns
from gateway.triton.affinity import LOAD_FACTOR, nearest, prefix_key
from gateway.triton.replicas import ReplicaState
from tests.gateway.triton.fake_triton import generation, until
from wire.history import Turn

SYSTEM = Message(role="system", content="You answer briefly. " * 400)
FIRST = Message(role="user", content="我想了解一下流体力学。" * 40)


@dataclass
class Place:
    upstream: str
    outstanding: int = 0


def places(count: int) -> list[Any]:
    return [Place(f"10.0.0.{number}:8001") for number in range(count)]


def chat(*messages: Message, offer: ToolOffer | None = None) -> Conversation:
    return Conversation(messages, offer)


def keys(count: int) -> list[bytes]:
    made = [
        prefix_key("m", chat(SYSTEM, Message(role="user", content=f"question {n}"))) for n in range(count)
    ]
    assert len(set(made)) == count
    return [key for key in made if key is not None]


def test_all_turns_of_a_conversation_have_one_key() -> None:
    turns = [SYSTEM, FIRST]
    key = prefix_key("m", chat(*turns))
    for number in range(8):
        turns += [Message(role="assistant", content=f"a{number}"), Message(role="user", content=f"q{number}")]
        assert prefix_key("m", chat(*turns)) == key
    assert prefix_key("m", chat(SYSTEM, Message(role="user", content="another"))) != key
    assert prefix_key("other", chat(*turns)) != key


@pytest.mark.parametrize(
    ("prompt", "longer", "other"),
    [
        (PlainText("x" * 5000), PlainText("x" * 9000), PlainText("y" * 5000)),
        (TokenIds((7,) * 2000), TokenIds((7,) * 3000), TokenIds((8,) * 2000)),
        (
            Turns((), FIRST.content),
            Turns((Turn("user", FIRST.content), Turn("assistant", "a")), "more"),
            Turns((), SYSTEM.content),
        ),
    ],
    ids=["text", "ids", "turns"],
)
def test_prompts_of_every_kind_are_known_by_their_beginning(
    prompt: Prompt, longer: Prompt, other: Prompt
) -> None:
    assert prefix_key("m", prompt) == prefix_key("m", longer) != prefix_key("m", other)
    assert prefix_key("m", other) is not None


def test_tools_are_part_of_the_beginning() -> None:
    def offering(name: str) -> Conversation:
        return chat(FIRST, offer=ToolOffer(tools=(Tool(name=name, description=None, parameters={}),)))

    assert len({prefix_key("m", prompt) for prompt in (offering("a"), offering("b"), chat(FIRST))}) == 3


@pytest.mark.parametrize(
    "prompt", [chat(Message(role="user", content="hi")), PlainText("hi"), TokenIds((1, 2)), Turns((), "hi")]
)
def test_a_short_prompt_has_no_key(prompt: Prompt) -> None:
    assert prefix_key("m", prompt) is None


def test_every_process_finds_the_same_place() -> None:
    code = (
        "from gateway.triton.affinity import *; from gateway.core.request import PlainText;"
        "from tests.gateway.triton.test_affinity import places;"
        "print(nearest(places(9), prefix_key('m', PlainText('长' * 999))).upstream)"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    key = prefix_key("m", PlainText("长" * 999))
    assert key is not None
    assert found == {nearest(places(9), key).upstream + "\n"}


def test_when_a_place_comes_only_its_own_conversations_move() -> None:
    before, after = places(3), places(4)
    moved = [(nearest(before, key), nearest(after, key)) for key in keys(400)]
    assert {new.upstream for old, new in moved if old != new} == {after[3].upstream}
    assert 60 < sum(old != new for old, new in moved) < 140


def test_a_beginning_that_everybody_sends_fills_one_place_after_the_other() -> None:
    three = places(3)
    key = keys(1)[0]
    for running in range(1, 301):
        nearest(three, key).outstanding += 1
        assert max(place.outstanding for place in three) <= LOAD_FACTOR * running / 3 + 1
    assert min(place.outstanding for place in three) > 0


@pytest.mark.parametrize("at_once", [8, 60])
def test_conversations_stay_and_the_load_is_even(at_once: int) -> None:
    """60 conversations of 8 turns that end in any order; a cache has all turns that it has seen."""
    for seed in range(10):
        chance, three = random.Random(seed), places(3)
        waiting, turns = keys(60), Counter[bytes]()
        running: list[tuple[bytes, Any]] = []
        cached = Counter[tuple[str, bytes]]()
        served, found, begun = Counter[str](), 0, 0
        while running or waiting:
            if waiting and len(running) < at_once:
                key = waiting.pop()
            else:
                key, place = running.pop(chance.randrange(len(running)))
                place.outstanding -= 1
                if turns[key] == 8:
                    continue
            place = nearest(three, key)
            place.outstanding += 1
            running.append((key, place))
            served[place.upstream] += 1
            found += cached[place.upstream, key]
            begun += turns[key]
            turns[key] += 1
            cached[place.upstream, key] = turns[key]
        assert (sum(served.values()), begun) == (480, 60 * 28)
        assert max(served.values()) <= 1.25 * 160
        assert found >= 0.9 * begun


async def test_a_conversation_stays_where_it_began_until_that_fails(tritons: Any, serve: Any) -> None:
    servers = [await tritons() for _ in range(3)]
    pool = await serve(*servers)
    turns = [SYSTEM, FIRST]

    async def served_by() -> int:
        before = [len(server.requests) for server in servers]
        assert [event async for event in pool.generate(generation(prompt=chat(*turns)))]
        (place,) = [at for at, server in enumerate(servers) if len(server.requests) > before[at]]
        return place

    home = await served_by()
    for number in range(6):
        turns += [Message(role="assistant", content="a"), Message(role="user", content=f"q{number}")]
        assert await served_by() == home
    await servers[home].stop()
    await until(lambda: sum(replica.state is ReplicaState.READY for replica in pool.replicas()) == 2)
    other = await served_by()
    assert other != home
    assert await served_by() == other
