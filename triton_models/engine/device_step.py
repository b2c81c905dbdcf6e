"""The parts of a step that are the same whatever it holds, and so can be captured."""

from torch import Tensor

from triton_models.engine.backend import Backend, StepOperations
from triton_models.engine.layout import StepLayout
from triton_models.engine.model import CausalModel
from triton_models.engine.sampling_rows import plain_inputs
from triton_models.engine.slots import SlotTable


class DeviceStep:
    """All that its parts read but their arguments has its place on the device."""

    def __init__(
        self, model: CausalModel, backend: Backend, operations: StepOperations, slots: SlotTable
    ) -> None:
        self._model = model
        self._sample = backend.sample
        self._operations = operations
        self._slots = slots

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        """Return [T, width], what a step leaves behind the last layer."""
        return self._model.forward(tokens, self._operations(layout))

    def logits(self, hidden: Tensor, layout: StepLayout) -> Tensor:
        """Return the [S, vocabulary] logits of some rows of what `forward` gave, [S, width]."""
        return self._model.logits(hidden, self._operations(layout))

    def decode(self, slots: Tensor, longest: int) -> Tensor:
        """Return [D, vocabulary] logits of decodes, [D] int64 slots."""
        positions = self._slots.lengths[slots]
        layout = StepLayout(
            tables=self._slots.tables,
            slots=slots.int(),
            positions=positions,
            decode_lengths=(positions + 1).int(),
            longest_decode=longest,
        )
        operations = self._operations(layout)
        return self._model.logits(self._model.forward(self._slots.tokens[slots], operations), operations)

    def finish(self, slots: Tensor, logits: Tensor) -> Tensor:
        """Sample for decodes that ask for nothing special, note it in their slots, return [3, D] status."""
        status = self._sample(logits, plain_inputs(self._slots, slots)).status
        self._slots.advance(slots, slots, status[0])
        return status
