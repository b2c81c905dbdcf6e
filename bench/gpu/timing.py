"""Times launches on a CUDA device inside a CUDA graph, which is how the engine runs them."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Launch = Callable[[], None]

_TARGET_MS = 15.0
_REPLAYS = (5, 50)


def microseconds(launches: Sequence[Launch], device: torch.device) -> float:
    """Return the median time of one launch.

    Args:
        launches: captured one after the other; use enough different data that it does not fit into the L2
            cache.
        device: without CUDA, each launch runs once, timed by the wall clock.
    """
    if device.type != "cuda":
        began = time.perf_counter()
        for launch in launches:
            launch()
        return (time.perf_counter() - began) * 1e6 / len(launches)
    launches[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    first = _replay_ms(graph)
    rounds = int(min(max(_TARGET_MS / max(first, 1e-3), _REPLAYS[0]), _REPLAYS[1]))
    return statistics.median(_replay_ms(graph) for _ in range(rounds)) * 1e3 / len(launches)


def _replay_ms(graph: torch.cuda.CUDAGraph) -> float:
    begin = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def terabytes_per_second(device: torch.device, size: int) -> float:
    """Return the rate of a large copy, in bytes read plus written: nearly the memory's maximum."""
    source = torch.empty(size, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * size / microseconds([copy], device) / 1e6
