"""The parts of a step that do the same work whatever tokens it contains, and so can be captured."""

from torch import Tensor

from triton_models.engine.backend import Backend, StepOperations
from triton_models.engine.layout import StepLayout
from triton_models.engine.model import CausalModel
from triton_models.engine.sampler import plain_inputs
from triton_models.engine.slots import SlotTable


class DeviceStep:
    """The parts of a step. Besides their arguments, they use only tensors at fixed device addresses."""

    def __init__(
        self, model: CausalModel, backend: Backend, operations: StepOperations, slots: SlotTable
    ) -> None:
        self._model = model
        self._sample = backend.sample
        self._operations = operations
        self._slots = slots

    def forward(self, tokens: Tensor, layout: StepLayout) -> Tensor:
        """Return the hidden states of all rows of a step, [T, width], for `logits`."""
        return self._model.forward(tokens, self._operations(layout))

    def logits(self, hidden: Tensor, layout: StepLayout) -> Tensor:
        """Return logits [S, vocabulary]; `hidden`: a copy of some rows of `forward`'s result, overwritten."""
        return self._model.logits(hidden, self._operations(layout))

    def decode(self, slots: Tensor, longest: int) -> Tensor:
        """Return the logits [D, vocabulary] of the decodes in `slots`, [D] int64."""
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
        """Sample for plain decodes, record the tokens in their slots, and return the status [3, D]."""
        status = self._sample(logits, plain_inputs(self._slots, slots)).status
        self._slots.advance(slots, slots, status[0])
        return status
