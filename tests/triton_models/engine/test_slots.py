from dataclasses import fields

import torch

from tests.triton_models.engine.fake_model import request
from triton_models.engine.sampling import SamplingParams
from triton_models.engine.sequence import Sequence
from triton_models.engine.slots import SlotTable, Staged, Staging, stage_blocks, stage_sequences

CPU = torch.device("cpu")


def sequence(slot: int, sampling: SamplingParams) -> Sequence:
    made = Sequence(request(f"r{slot}", (4, 5, 6), sampling), arrival=0, arrived_at=0.0, max_tokens=8)
    made.slot = slot
    return made


def load(table: SlotTable, loaded: list[tuple[Sequence, int]], entries: list[tuple[int, int, int]]) -> None:
    staging = Staging()
    stage_sequences(staging, loaded)
    stage_blocks(staging, entries)
    views = staging.upload(CPU)
    empty = torch.empty(0, dtype=torch.int64)
    names = [each.name for each in fields(Staged) if each.name != "views"]
    table.load(Staged.of({name: views.get(name, empty) for name in names}))


def test_a_loaded_sequence_has_its_whole_state_and_nothing_of_the_last_holder() -> None:
    table = SlotTable(3, 4, CPU)
    load(table, [(sequence(1, SamplingParams(seed=1)), 9)], [(1, 0, 5), (1, 1, 6), (1, 2, 7)])
    newcomer = sequence(1, SamplingParams(temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, seed=-3))
    newcomer.tokens.append(11)
    load(table, [(newcomer, 4)], [(1, 0, 8)])
    assert table.tables[1].tolist() == [8, 0, 0, 0]
    assert (table.lengths[1], table.drawn[1], table.seeds[1]) == (4, 1, -3)
    assert (table.temperatures[1], table.top_k[1]) == (0.5, 7)
    assert (table.top_p[1], table.min_p[1]) == (0.25, 0.125)
    assert not table.tables[[0, 2, table.spare]].any()


def test_blocks_come_one_by_one() -> None:
    table = SlotTable(3, 4, CPU)
    load(table, [], [(0, 3, 9), (2, 0, 1)])
    assert table.tables.tolist() == [[0, 0, 0, 9], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_a_step_advances_what_it_decoded_and_what_it_sampled() -> None:
    table = SlotTable(3, 4, CPU)
    table.lengths[:] = torch.tensor([5, 3, 8, 0])
    table.advance(torch.tensor([2]), torch.tensor([2, 0]), torch.tensor([40, 41]))
    assert table.lengths.tolist() == [5, 3, 9, 0]
    assert table.tokens.tolist() == [41, 0, 40, 0]
    assert table.drawn.tolist() == [1, 0, 1, 0]
