"""Tensors to engine requests and back: the implementation behind every repository entry's `model.py`.

The threads, and what each may do:

* Triton's thread calls `execute`, which only reads tensors and passes them on; it neither waits nor sends;
* the intake thread decodes requests, and answers probes and cancels;
* the preparing thread renders and tokenizes prompts, and queues them in the engine;
* grammar threads compile the grammars of requests that have one;
* the tokenizing thread answers requests to count tokens;
* the engine's thread runs steps; it never sends (a send costs as much as a token);
* the delivery thread turns each step's outputs into text, and sends the frames of delta channels;
* the sender thread sends everything else, watches for clients that left, and keeps silent calls alive;
* the metrics thread is the only one that touches Triton's custom metrics;
* the watchdog ends a process that its server has given up.

Intake, preparing, tokenizing, delivery, sender and metrics are a `Worker` each.
"""
