"""Random walks through a grammar's masks: what a model of the highest temperature would say."""

import random
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from triton_models.text.answer import AnswerStream
from triton_models.text.formats import chat_format
from triton_models.text.grammars import GrammarMask, Grammars
from triton_models.text.tokenizers import Tokenizer
from wire.grammar import Grammar


class Words:
    """A row of a bit mask, with room for a padded vocabulary; or so many rows."""

    def __init__(self, size: int, *rows: int) -> None:
        self.array = np.zeros((*rows, -(-size // 32) + 4), dtype=np.int32)

    def numpy(self) -> NDArray[np.int32]:
        return self.array


@dataclass
class Walk:
    """A text, the ids that it came from, and whether it came to its end."""

    text: str
    ids: list[int]
    ended: bool
    segments: list[int]


class Walker:
    """Grammars over one golden tokenizer."""

    def __init__(self, tokenizer: Tokenizer, name: str) -> None:
        self.tokenizer = tokenizer
        self.format = chat_format(name, tokenizer)
        self.grammars = Grammars(tokenizer, self.format)

    def allowed(self, mask: GrammarMask) -> list[int]:
        words = Words(self.tokenizer.size)
        mask.fill(words)
        bits = np.unpackbits(words.array.view(np.uint8), bitorder="little")
        assert not bits[self.tokenizer.size :].any()
        return [int(each) for each in np.flatnonzero(bits)]

    def walk(
        self,
        kind: str,
        text: str = "",
        *,
        seed: int = 0,
        steps: int = 400,
        raw: bool = False,
        metadata: str | None = None,
    ) -> Walk:
        """Sample until the grammar ends: all allowed tokens alike, but ends and closings more often."""
        mask = self.grammars.compile(Grammar(kind, text), continues=raw, metadata=metadata).mask()
        dice = random.Random(seed)
        answer = AnswerStream(self.tokenizer, self.format, raw=raw, metadata=metadata)
        ids: list[int] = []
        segments: list[int] = []
        said = ""
        while len(ids) < steps:
            allowed = self.allowed(mask)
            stops = [each for each in allowed if each in self.format.stop_ids]
            if stops and (len(stops) == len(allowed) or dice.random() < 0.3):
                assert set(stops) == self.format.stop_ids
                return Walk(said + answer.finish().text, ids, ended=True, segments=segments)
            going_on = [each for each in allowed if each not in stops]
            closing = [each for each in going_on if self.tokenizer.piece(each) in (b'"', '"', "]", "}", "'")]
            chosen = dice.choice(closing if closing and dice.random() < 0.3 else going_on)
            mask.accept(chosen)
            ids.append(chosen)
            delta = answer.push(chosen)
            segments += [len(said) + at for at, _ in delta.segments]
            said += delta.text
        return Walk(said + answer.finish().text, ids, ended=False, segments=segments)

    def look_ahead(self, grammar: Grammar, seed: int = 0) -> int:
        """Walk with one mask that looks ahead at each token and one that does not; return how many it forced.

        It must take what comes and what it forces, and nothing that can never come; fill the rows as a mask
        that was told those tokens; and stay as it is.
        """
        compiled = self.grammars.compile(grammar)
        ids = self.walk(grammar.kind, grammar.text, seed=seed).ids
        ahead, usual = compiled.mask(), compiled.mask()
        never = [self.tokenizer.size + 10**6, self.tokenizer.special_ids["[MASK]"]]
        dice = random.Random(seed)
        count = 0
        for at, token_id in enumerate(ids):
            forced, some = list(ahead.forced()), ids[at : at + dice.randrange(1, 9)]
            count += len(forced)
            assert ahead.takes(forced) == len(forced)
            assert ahead.takes([*some, dice.choice(never), ids[0]]) == len(some)
            for tokens in (forced, some):
                told = compiled.mask()
                told.matcher = usual.matcher.deep_copy()
                rows = [Words(self.tokenizer.size) for _ in tokens]
                ahead.fill_ahead(tokens, rows)
                for each, row in zip(tokens, rows, strict=True):
                    told.accept(each)
                    wanted = Words(self.tokenizer.size)
                    told.fill(wanted)
                    assert np.array_equal(row.array, wanted.array)
            assert self.allowed(ahead) == self.allowed(usual)
            ahead.accept(token_id)
            usual.accept(token_id)
        return count
