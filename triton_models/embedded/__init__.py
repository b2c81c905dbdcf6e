"""Starts, loads, watches and stops the real tritonserver from the `nvidia-pytriton` wheel.

    embedded            this package's process: the supervisor; tells its parent what happens (wire/events.py)
    └── warden          outlives the server by design, so that nothing of it is left behind (warden.py)
        └── tritonserver        every port on 127.0.0.1
            └── stub ...        one Python process per repository entry

Whichever of these processes dies first, even by SIGKILL, takes the rest with it or is replaced:

* the parent of `embedded`: its end of stdin's pipe closes, and `embedded` stops;
* `embedded`: the kernel signals the warden, which stops the server and removes what it leaves behind;
* the warden: the kernel kills tritonserver; `embedded` kills the stubs and starts anew;
* tritonserver: the warden kills the stubs; `embedded` starts anew;
* a stub: the supervisor unloads and loads its entry.

This package knows Triton's protocol and the wire contract. It holds no model and no tokenizer, and never
imports torch.
"""
