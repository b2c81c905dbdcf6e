"""The prefix cache: finds the beginnings of sequences among computed KV blocks. Knows nothing of tensors."""

import struct

from triton_models.engine.blocks import PADDING_BLOCK, BlockManager
from triton_models.engine.sequence import Sequence

_NUMBER = 4
"""Bytes of a number in a key."""


class PrefixCache:
    """Shares full blocks among sequences that begin with the same tokens.

    * Blocks are found by the hash of their key (`_keys`). The dict also compares the keys themselves, so
      different tokens with the same hash are never confused.
    * A block can be found once the step that computes it is *scheduled*: work scheduled after that, in the
      same step or later, reads it after it is written (each layer writes the keys and values of all tokens
      before any attends). Full blocks are never written again.
    * A sequence registers a block only behind registered blocks that it holds itself, so every holder of a
      block also holds all blocks before it. The block manager evicts in order of release, and within one
      release from the end, so a parent outlives its children. If another sequence registered the same tokens
      first, the later one's blocks from there on stay unregistered.
    * The last block of a sequence is not full, and is written while the sequence goes on. Once it stops, one
      that begins with all of its tokens finds that block, too, its tail (`tail`). The next turn of a
      conversation takes it and writes on in it; a request with `shares_tail`, beside which others may want
      it, has it copied.
    * With a request's `prefix_cache` False, blocks are neither looked up nor registered.
    * While log-probabilities or logits of a sequence's prompt are still to be reported, nothing is looked up
      for it: they can only be had by computing the prompt.
    """

    def __init__(self, blocks: BlockManager) -> None:
        self._blocks = blocks
        # Bytes and numbers, not tuples or nodes of a tree: there may be hundreds of thousands, and these are
        # small and ignored by the garbage collector.
        self._known: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        """Each block's parent (the block before it; the padding block for the first) and its tokens, packed:
        those of a full block, or the fewer ones of a tail.

        Keys and values depend on every token before, so the same tokens after another parent are another
        block. A parent is never forgotten before its children, so its number stands for all tokens up to it.
        """
        self._begun: dict[bytes, int] = {}
        """The newest tail with each key, but for the last token in it."""
        self._key = struct.Struct(f"<{1 + blocks.block_size}i")
        self._registered: dict[Sequence, int] = {}
        """For each running sequence that uses the cache: how many of its first blocks are registered."""
        self._newest: Sequence | None = None
        """For whom was searched last: choices of one prompt and beams follow each other."""
        blocks.on_eviction = self._forget

    def find(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks for the beginning of a waiting sequence, which does not hold them yet.

        At least its newest token is left to compute, because that gives the logits for the next one. What is
        found is kept in the sequence, for the next time.
        """
        if sequence.unscored or not sequence.request.prefix_cache:
            return []
        self._take_over(sequence)
        found, keys = sequence.found, sequence.found_keys
        # Whose child is still there, that is, too.
        while found and self._keys.get(found[-1]) is not keys[-1]:
            found.pop()
            keys.pop()
        more = self._search(sequence, found)
        found += more
        keys += [self._keys[block] for block in more]
        return found

    def start(self, sequence: Sequence) -> None:
        """Register a sequence that starts to run and holds just the blocks that `find` returned."""
        if sequence.request.prefix_cache:
            self._registered[sequence] = len(sequence.blocks)
            sequence.computed = len(sequence.blocks) * self._blocks.block_size

    def tail(self, sequence: Sequence) -> tuple[int, int] | None:
        """Return the longest tail with which a starting sequence goes on behind the blocks that it found.

        All of a tail's tokens, or all but the last, which may be a stop id that the next turn does not have,
        are the sequence's; at least its newest is left to compute. So nobody takes a tail of which they need
        only the beginning.

        Returns:
            The block, which nobody holds, and how many of its tokens are the sequence's: it is to be taken,
            or copied by the step that is being scheduled. None: there is none.
        """
        if sequence not in self._registered or sequence.unscored:
            return None
        full, size = len(sequence.blocks), self._blocks.block_size
        wanted = self._tail_key(sequence, full, min(len(sequence.tokens), (full + 1) * size) - 1)
        for end in range(len(wanted), _NUMBER, -_NUMBER):
            begin = wanted[:end]
            block = self._known.get(begin, self._begun.get(begin))
            if block is not None:
                return block, end // _NUMBER - 1
        return None

    def take(self, sequence: Sequence, tail: int) -> None:
        """Give a starting sequence a tail, to write on in it."""
        self._forget(tail)
        self._blocks.retain([tail])
        self._blocks.discard(tail)
        sequence.blocks.append(tail)

    def register(self, sequence: Sequence, computed: int) -> None:
        """Register the full blocks among the first `computed` tokens of a running sequence.

        Those tokens must be known, and the steps that compute them scheduled.
        """
        count = self._registered.get(sequence)
        if count is None:
            return
        size, blocks = self._blocks.block_size, sequence.blocks
        for place in range(count, computed // size):
            parent = blocks[place - 1] if place else PADDING_BLOCK
            key = self._key.pack(parent, *sequence.tokens[place * size : (place + 1) * size])
            if key in self._known:
                del self._registered[sequence]
                return
            block = blocks[place]
            self._known[key] = block
            self._keys[block] = key
            self._blocks.keep(block)
            self._registered[sequence] = place + 1

    def stop(self, sequence: Sequence, computed: int) -> None:
        """Forget a sequence that stops running, `computed` of whose known tokens were.

        Its registered blocks stay, and so does its tail.
        """
        self.register(sequence, computed)
        full = self._registered.pop(sequence, None)
        if full is None or not computed % self._blocks.block_size:
            return
        key = self._tail_key(sequence, full, computed)
        if key not in self._known:
            self._known[key] = self._begun[key[:-_NUMBER]] = block = sequence.blocks[full]
            self._keys[block] = key
            self._blocks.keep(block)

    def clear(self) -> None:
        """Forget every block, since what is in some of them cannot be trusted."""
        for block in list(self._keys):
            self._forget(block)
            self._blocks.discard(block)
        self._registered.clear()

    def _tail_key(self, sequence: Sequence, full: int, end: int) -> bytes:
        """Return the key of a sequence's tokens behind its first `full` blocks, up to `end`."""
        parent = sequence.blocks[full - 1] if full else PADDING_BLOCK
        tokens = sequence.tokens[full * self._blocks.block_size : end]
        return struct.pack(f"<{1 + len(tokens)}i", parent, *tokens)

    def _take_over(self, sequence: Sequence) -> None:
        """Begin with what was found for the last one, if its prompt is the same."""
        last, self._newest = self._newest, sequence
        if last is None or last.request.prompt_ids is not sequence.request.prompt_ids:
            return
        tokens = min(len(sequence.request.prompt_ids), len(sequence.tokens) - 1)
        count = min(len(last.found), tokens // self._blocks.block_size)
        if count > len(sequence.found):
            sequence.found, sequence.found_keys = last.found[:count], last.found_keys[:count]

    def _search(self, sequence: Sequence, begin: list[int]) -> list[int]:
        """Return the registered blocks that continue a sequence after its blocks `begin`."""
        size, tokens = self._blocks.block_size, sequence.tokens
        parent = begin[-1] if begin else PADDING_BLOCK
        found: list[int] = []
        for start in range(len(begin) * size, len(tokens) - size, size):
            block = self._known.get(self._key.pack(parent, *tokens[start : start + size]))
            if block is None:
                break
            found.append(block)
            parent = block
        return found

    def _forget(self, block: int) -> None:
        key = self._keys.pop(block)
        del self._known[key]
        if self._begun.get(key[:-_NUMBER]) == block:
            del self._begun[key[:-_NUMBER]]
