"""A step on the device, from its launch to its results."""

from triton_models.engine.batch import Batch
from triton_models.engine.results import Sampled
from triton_models.engine.runner import Begun, Launched, Runner


class Step:
    """A scheduled step, launched as far as that does not take the results of the step before.

    Its sampling is left out if one of its token masks must first be told a token that is still in flight:
    `sample` launches that. Steps are created, sampled and collected in the same order.

    Args:
        runner: computes it.
        batch: its work; not empty.
        began: when its scheduling began, in seconds of `time.perf_counter`.
    """

    def __init__(self, runner: Runner, batch: Batch, *, began: float) -> None:
        self.batch = batch
        self.began = began
        self._runner = runner
        # One or the other: what sampling needs (logits, above all) must not outlive it on the device.
        self._state: Begun | Launched = runner.begin(batch)
        if not batch.masks_wait:
            self.sample()
        batch.advance()

    def sample(self) -> Launched:
        """Launch the sampling, unless that is done already."""
        if isinstance(self._state, Begun):
            self._state = self._runner.sample(self._state)
        return self._state

    def collect(self) -> list[Sampled]:
        """Wait for the results."""
        return self._runner.collect(self.sample())
