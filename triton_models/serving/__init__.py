"""Tensors to engine requests and back: the implementation behind every repository entry's `model.py`.

The threads of a stream entry, and what each may do:

* Triton's thread calls `execute`, which only reads tensors and hands over; it never waits.
* the intake thread renders and tokenises prompts, and offers them to the engine;
* the engine's thread steps; it never sends (a send costs as much as a token);
* sender threads turn tokens into text and send it, joining what piled up meanwhile;
* the monitor thread watches for cancels and keeps quiet streams alive with heartbeats;
* the metrics thread is the only one that touches Triton's custom metrics.
"""
