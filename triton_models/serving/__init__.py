"""Tensors to engine requests and back: the implementation behind every repository entry's `model.py`.

The threads of a stream entry, and what each may do:

* Triton's thread calls `execute`, which only reads tensors and passes them on; it never waits;
* grammar threads compile the grammars of requests that have one;
* the intake thread renders and tokenises prompts, and queues them in the engine;
* the engine's thread runs steps; it never sends (a send costs as much as a token);
* the step-delivery thread takes each step's outputs: it turns those of delta channels into text and sends
  their frames, and passes the others on to the sender threads;
* sender threads turn tokens into text and send it on the requests' own streams, joining what piled up
  meanwhile;
* the monitor thread watches for cancels and keeps silent streams alive with heartbeats;
* the metrics thread is the only one that touches Triton's custom metrics.
"""
