"""Requests of every kind whose answers can be guessed: masks that look ahead, penalties, and all options."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from tests.triton_models.engine.fake_model import POISON, VOCABULARY, NearMask, request
from tests.triton_models.engine.wild_mix import EvenTokens
from triton_models.engine.sampling import SamplingParams, TokenMask
from triton_models.engine.sequence import Request
from triton_models.serving.engine_requests import TokenLimits
from triton_models.text.grammars import Grammars
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar

if TYPE_CHECKING:
    from triton_models.text.formats import ChatFormat

CYCLE = 9
"""Ids below are the digits from 0 on; the model likes to count."""
END = VOCABULARY - 2
PENALTIES = {
    "repetition_penalty": (1.0, 0.8, 1.3),
    "presence_penalty": (0.0, -0.7, 0.9),
    "frequency_penalty": (0.0, -0.5, 0.4),
}
KINDS = ("free", "masked", "penalised", "both")


class ToyTokenizer(Tokenizer):
    """Digits, some letters, what JSON needs, and longer pieces of these: most texts have many splits."""

    def __init__(self) -> None:
        pieces = [*"0123456789", *"abcdefklnrstuy", *'{}[]":,.-+ ', "\n", '{"', '":', '",', ', "', '": ']
        pieces += [
            '"a',
            '"ab',
            "ab",
            "abc",
            "de",
            "def",
            "key",
            "true",
            "01",
            "012",
            "345",
            "45",
            "678",
            "}]",
        ]
        pieces += [', "key": ', "null", "false", "str"]
        super().__init__([each.encode() for each in pieces], ["end", "poison"], eos_id=END)
        assert self.size == VOCABULARY == POISON + 1
        self._by_text = {each: at for at, each in enumerate(pieces)}

    def encode(self, text: str) -> list[int]:
        ids = []
        while text:
            piece = next(text[:length] for length in range(9, 0, -1) if text[:length] in self._by_text)
            ids.append(self._by_text[piece])
            text = text[len(piece) :]
        return ids

    def decode(self, ids: Any) -> str:
        return "".join(str(self.piece(each), "utf-8") for each in ids)


TOKENIZER = ToyTokenizer()
GRAMMARS = Grammars(TOKENIZER, cast("ChatFormat", SimpleNamespace(stop_ids={END}, segment_roles={})))
RECORD = """{
    "type": "object",
    "properties": {"abcdef": {"type": "integer"}, "key": {"enum": ["ab", true]}, "b": {"type": "string"}},
    "required": ["abcdef", "key", "b"],
    "additionalProperties": false
}"""
ALLOWED = (
    Grammar("json_schema", RECORD),
    Grammar("json_schema", f'{{"type": "array", "items": {RECORD}}}'),
    Grammar("regex", "(012345678)+[abc]*"),
    Grammar("regex", "([0-8]{1,9} ?)+"),
    Grammar("choice", '["abcdefabc0123", "abcdefabc0145", "true"]'),
)


class Plain(NearMask):
    """A mask that cannot look ahead."""

    def fill(self, words: Any) -> None:
        words.fill_(-2)

    def accept(self, token_id: int) -> None:
        assert token_id % 32


def some_mask(dice: random.Random, *, stops: Sequence[int], least: int) -> TokenMask:
    """By a grammar, by limits, by both, or a simple one."""
    kind = dice.choice(("grammar", "grammar", "limits", "both", "even", "plain"))
    grammar = GRAMMARS.compile(dice.choice(ALLOWED)).mask() if kind in {"grammar", "both"} else None
    if kind in {"limits", "both"}:
        banned = [(1, 2, 3), (7, 8), (dice.randrange(CYCLE),)]
        allowed = dice.choice((None, [*range(40)])) if kind == "limits" else None
        return TokenLimits(allowed, banned, VOCABULARY).mask(grammar, stop_ids=stops, min_tokens=least)
    return grammar or (EvenTokens() if kind == "even" else Plain())


def some_requests(count: int, kind: str, seed: int = 3) -> list[Request]:
    """Requests of one of `KINDS`, each with any of all other options."""
    dice = random.Random(f"{kind} {seed}")
    return [_request(dice, number, kind) for number in range(count)]


def _request(dice: random.Random, number: int, kind: str) -> Request:
    options: dict[str, Any] = {
        "temperature": dice.choice((0.0, 0.7, 1.3)),
        "top_p": dice.choice((1.0, 1.0, 0.8)),
        "top_k": dice.choice((0, 0, 5)),
        "min_p": dice.choice((0.0, 0.0, 0.05)),
        "logprobs": dice.choice((None, None, 2)),
        "min_tokens": dice.choice((0, 0, 1, 1)),
        "logit_bias": dice.choice(({}, {}, {4: 3.0, 5: -100.0})),
        "stop_token_ids": frozenset({END, *dice.sample(range(END), dice.choice((0, 0, 3)))}),
        "max_tokens": dice.choice((1, 2, 9, 40, 60)),
    }
    if options["min_tokens"]:
        options["min_tokens"] = dice.choice((1, options["max_tokens"]))
    if kind in {"penalised", "both"}:
        options |= {name: dice.choice(values) for name, values in PENALTIES.items()}
    if kind in {"masked", "both"}:
        options["mask"] = some_mask(dice, stops=options["stop_token_ids"], least=options["min_tokens"])
    prompt = [dice.randrange(CYCLE) for _ in range(dice.choice((1, 3, 20)))]
    asked = request(str(number), prompt, SamplingParams(seed=number, **options))
    counted = range(min(options["max_tokens"] - 1, dice.choice((0, 0, 5))))
    generated = tuple(each for each in counted if each not in options["stop_token_ids"])
    return replace(
        asked,
        generated_ids=() if "mask" in options else generated,
        priority=dice.choice((0, 0, 1)),
        prompt_logprobs=dice.choice((None, None, None, 1)),
    )
