from types import SimpleNamespace

import torch

from tests.triton_models.engine.fake_model import request
from triton_models.engine.sampler import SamplerOutputs
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Chunk, Sequence
from triton_models.engine.slots import SlotTable, Staging, download, stage_slots

CPU = torch.device("cpu")


def sequence(slot: int, sampling: SamplingParams) -> Sequence:
    made = Sequence(request(f"r{slot}", (4, 5, 6), sampling), arrival=0, arrived_at=0.0, max_tokens=8)
    made.slot = slot
    return made


def load(
    table: SlotTable,
    *,
    decodes: Sequence | None = None,
    drafts: Sequence | None = None,
    prefills: Sequence | None = None,
) -> None:
    """Load a step with one more token of the first, also with two guesses, and all tokens of the third."""
    staging = Staging()
    stage_slots(
        staging,
        [] if decodes is None else [Chunk(decodes, decodes.computed, 1, samples=True)],
        [] if drafts is None else [Chunk(drafts, drafts.computed, 3, samples=True, guesses=(7, 8))],
        [] if prefills is None else [Chunk(prefills, 0, len(prefills.tokens), samples=True)],
        4,
    )
    table.load(SimpleNamespace(**staging.upload(CPU)))


def test_a_loaded_sequence_has_its_whole_state_and_nothing_of_the_last_holder() -> None:
    table = SlotTable(3, 4, CPU)
    first = sequence(1, SamplingParams(seed=1))
    first.tokens += range(6)
    first.blocks = [5, 6, 7]
    load(table, prefills=first)
    assert table.tables[1].tolist() == [5, 6, 7, 0]
    newcomer = sequence(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=-3))
    newcomer.tokens.append(11)
    newcomer.blocks = [8]
    load(table, prefills=newcomer)
    assert table.tables[1].tolist() == [8, 0, 0, 0]
    assert (table.lengths[1], table.drawn[1], table.seeds[1]) == (4, 1, -3)
    assert (table.temperatures[1], table.top_k[1]) == (0.5, 7)
    assert (table.top_p[1], table.min_p[1]) == (0.25, 0.125)
    assert not table.tables[[0, 2, table.spare]].any()
    (_, drawn, seeds, top_k), (temperatures, top_p, min_p) = table.rules(torch.tensor([0, 1]))
    assert (drawn.tolist(), seeds.tolist(), top_k.tolist()) == ([0, 1], [0, -3], [0, 7])
    assert (temperatures.tolist(), top_p.tolist(), min_p.tolist()) == ([0, 0.5], [0, 0.25], [0, 0.125])


def test_a_decode_brings_a_block_only_where_it_begins_one() -> None:
    table = SlotTable(3, 4, CPU)
    decoding = sequence(2, SamplingParams())
    decoding.blocks = [9, 1]
    decoding.computed = 3
    staging = Staging()
    stage_slots(staging, [Chunk(decoding, 3, 1, samples=True)], [], [], 4)
    staging.integers("anything", [1])
    assert not staging.upload(CPU)["table_entries"].numel()
    decoding.computed = 4
    load(table, decodes=decoding)
    assert table.tables.tolist() == [[0, 0, 0, 0], [0, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]


def test_guesses_tell_how_far_their_sequence_is_and_the_blocks_from_there_on() -> None:
    table = SlotTable(3, 4, CPU)
    guessing = sequence(1, SamplingParams(temperature=0.5, top_k=7, seed=-3))
    guessing.blocks = [5]
    load(table, prefills=guessing)
    # Three guesses were right, and the draw after them.
    guessing.tokens += [1, 2, 3, 4]
    guessing.computed = 6
    guessing.blocks += [6, 9]
    load(table, drafts=guessing)
    assert table.tables[1].tolist() == [5, 6, 9, 0]
    assert (table.lengths[1], table.drawn[1], table.seeds[1]) == (9, 4, -3)
    assert (table.temperatures[1], table.top_k[1]) == (0.5, 7)
    # The first block was told before.
    table.tables[1, 0] = 0
    load(table, drafts=guessing)
    assert table.tables[1].tolist() == [0, 6, 9, 0]


def test_a_step_advances_what_it_decoded_and_what_it_sampled() -> None:
    table = SlotTable(3, 4, CPU)
    table.lengths[:] = torch.tensor([5, 3, 8, 0])
    table.advance(torch.tensor([2]), torch.tensor([2, 0]), torch.tensor([40, 41]))
    assert table.lengths.tolist() == [5, 3, 9, 0]
    assert table.tokens.tolist() == [41, 0, 40, 0]
    assert table.drawn.tolist() == [1, 0, 1, 0]


def test_results_are_copied_to_the_host_with_what_is_none_of_them() -> None:
    status = torch.tensor([[7], [1], [1]])
    found = download(SamplerOutputs(status, None, None))
    assert (found.status.tolist(), found.logprobs, found.top_ids) == ([[7], [1], [1]], None, None)
