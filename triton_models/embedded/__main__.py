"""`python -m triton_models.embedded`: the embedded Triton as a process; it says what happens on stdout."""

import signal
import sys
import types

import tritonclient

if __name__ == "__main__":
    # While the rest is imported, a signal ends this process at once, and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    # Have this package be its generated messages alone. The rest of it, a client that nothing here uses,
    # imports numpy: 20 MB and 0.2 s.
    messages = types.ModuleType("tritonclient.grpc")
    messages.__path__ = [f"{folder}/grpc" for folder in tritonclient.__path__]
    sys.modules[messages.__name__] = messages

    from triton_models.embedded.command import main

    main()
