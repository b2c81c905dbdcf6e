"""A container's health check: Triton is ready, and every engine in it is alive.

    triton_health.py [--grpc HOST:PORT] [--metrics HOST:PORT] [--stale-s 30] [--liveness]
                     [--end-process PID] [--end-after-s 60]

Triton goes on calling a model ready whose process is dead or stuck, so this reads each engine's heartbeat
from Triton's metrics: the last moment at which the engine ran and its tokens could leave. Exit status 0:
well; 1: not, with the reason. A server with an engine whose heart has not beaten for `--end-after-s` never
becomes well by itself: `--end-process` names the process that then gets a SIGTERM, for whoever restarts it.

With `--liveness` Triton need only be alive, and no engine loaded: while an administrator has a model unloaded
or loaded anew, a server is not ready, and a restart would heal nothing.

It needs grpcio and the standard library.
"""

import argparse
import os
import re
import signal
import sys
import time
import urllib.request
from collections.abc import Iterator

import grpc

_HEARTBEAT = re.compile(r"^tritongate_engine_heartbeat_timestamp_seconds\{([^}]*)\} (\S+)$", re.MULTILINE)
_MODEL = re.compile(r'model="([^"]*)"')
_TIMEOUT_S = 3.0
# A proxy for the way out, as Docker may name one in every container, must get nothing of this.
_HTTP = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_NO_PROXY = [("grpc.enable_http_proxy", 0)]
_YES = b"\x08\x01"
"""A message whose first field is true; false is the default, hence an empty message."""


def main(arguments: list[str] | None = None) -> int:
    """Check, say what is wrong, and return the exit status."""
    options = _parser().parse_args(arguments)
    wanted = "Live" if options.liveness else "Ready"
    try:
        if not server_is(wanted, options.grpc):
            sys.stdout.write(f"Triton is not {wanted.lower()}\n")
            return 1
        ages = dict(heartbeat_ages(_get(f"http://{options.metrics}/metrics"), now=time.time()))
    except (OSError, grpc.RpcError) as error:
        said = error.details() if isinstance(error, grpc.Call) else error
        sys.stdout.write(f"Triton does not answer: {said}\n")
        return 1
    late = {model: age for model, age in ages.items() if age > options.stale_s}
    for model, age in late.items():
        sys.stdout.write(f"{model}: the engine's last heartbeat was {age:.0f} s ago\n")
    if options.end_process and any(age > options.end_after_s for age in late.values()):
        sys.stdout.write(f"ending process {options.end_process}\n")
        os.kill(options.end_process, signal.SIGTERM)
    missed = not ages and not options.liveness
    if missed:
        sys.stdout.write("Triton is ready, but no engine's heartbeat is among its metrics\n")
    return 1 if late or missed else 0


def heartbeat_ages(exposition: str, *, now: float) -> Iterator[tuple[str, float]]:
    """Yield each loaded engine's model and the seconds since its last heartbeat, as of Unix time `now`.

    An unloaded engine's heartbeat is 0: it is left out.
    """
    for labels, value in _HEARTBEAT.findall(exposition):
        if float(value) > 0:
            model = _MODEL.search(labels)
            yield (model[1] if model else labels), now - float(value)


def server_is(wanted: str, address: str) -> bool:
    """Ask `ServerLive` or `ServerReady`: both messages are so small that they need no generated code."""
    with grpc.insecure_channel(address, options=_NO_PROXY) as channel:
        ask = channel.unary_unary(f"/inference.GRPCInferenceService/Server{wanted}")
        return bool(ask(b"", timeout=_TIMEOUT_S) == _YES)


def _get(url: str) -> str:
    with _HTTP.open(url, timeout=_TIMEOUT_S) as response:
        return str(response.read().decode())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--grpc", default="127.0.0.1:8001")
    parser.add_argument("--metrics", default="127.0.0.1:8002")
    parser.add_argument("--stale-s", type=float, default=30.0)
    parser.add_argument("--liveness", action="store_true")
    parser.add_argument("--end-process", type=int)
    parser.add_argument("--end-after-s", type=float, default=60.0)
    return parser


if __name__ == "__main__":
    sys.exit(main())
