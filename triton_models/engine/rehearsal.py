"""How much GPU memory steps need besides weights and KV cache, measured by running the largest ones once."""

import gc
import logging
from dataclasses import dataclass

import torch

from triton_models.engine.backend import Backend
from triton_models.engine.captured_steps import LARGEST_PROMPTS
from triton_models.engine.memory import GIB, free_bytes
from triton_models.engine.model import CausalModel
from triton_models.engine.runner import Runner, current
from triton_models.engine.scoring import SLICE_ROWS
from triton_models.engine.settings import Capacity, EngineSettings

log = logging.getLogger(__name__)

_GRAPH_BYTES = 2 * 2**20
"""A generous estimate of what a driver keeps per captured graph of some hundreds of kernels."""

_LOGITS_COPIES = 10
"""Float32 copies of each logit in a step whose rows all ask for penalties, biases and log-probabilities."""

_SCORES_COPIES = 4
"""Float32 copies of each logit in a slice of a prompt whose log-probabilities are requested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What running the largest steps took, in bytes; `graphs` is the number of graphs to be captured."""

    held: int
    """No longer free once everything but the KV cache is allocated and the steps have run: tables,
    workspaces, libraries, kernels, and what the allocator keeps of the activations."""
    activations: int
    """The most that a step took temporarily."""
    graphs: int


def memory_beside_cache(model: CausalModel, backend: Backend, settings: EngineSettings) -> int:
    """Return the bytes of GPU memory that steps need besides the weights and the KV cache.

    A runner with a one-block cache allocates what the real one will, runs its largest steps, and is
    discarded.
    """
    with current(model.device):
        before = free_bytes(model.device)
        activations, graphs = _rehearse(model, backend, settings)
        # The runner is gone, but the allocator still holds all its memory.
        held = before - free_bytes(model.device)
        gc.collect()
        torch.cuda.empty_cache()
    rehearsed = Rehearsed(held=held, activations=activations, graphs=graphs)
    needed = needed_bytes(rehearsed, settings, model.vocab_size)
    log.info("steps need %.2f GiB beside weights and KV cache: %s", needed / GIB, rehearsed)
    return needed


def needed_bytes(rehearsed: Rehearsed, settings: EngineSettings, vocabulary: int) -> int:
    """Return how many bytes the KV cache must leave free.

    Besides `held`, these are for the graphs, whose activations have a pool of their own, and for steps that
    need more than those rehearsed: with more prompt tokens than are captured, with every sampling rule, or
    with log-probabilities of prompts. These three never use their memory at the same time.
    """
    activations = rehearsed.activations
    prompts = activations * max(settings.largest_step, LARGEST_PROMPTS) // LARGEST_PROMPTS
    logits = max(_LOGITS_COPIES * settings.max_running, _SCORES_COPIES * SLICE_ROWS)
    sampling = logits * vocabulary * torch.float32.itemsize
    pool = activations + rehearsed.graphs * _GRAPH_BYTES if rehearsed.graphs else 0
    return rehearsed.held + pool + max(0, prompts - activations, sampling - activations)


def _rehearse(model: CausalModel, backend: Backend, settings: EngineSettings) -> tuple[int, int]:
    """Return the most bytes that a step took temporarily, and how many graphs there will be."""
    context = min(settings.max_context or model.max_positions, model.max_positions)
    runner = Runner(model, backend, settings, Capacity(1, context, "a rehearsal"))
    torch.cuda.reset_peak_memory_stats(model.device)
    allocated = torch.cuda.memory_allocated(model.device)
    graphs = runner.rehearse()
    torch.cuda.synchronize(model.device)
    return torch.cuda.max_memory_allocated(model.device) - allocated, graphs
