import json
import os
import subprocess
import sys

DESKTOP = 99 * 1024
"""Bytes for one program on GPUs of compute capability 8.6, 8.9 and 12.0 (CUDA C++ Programming Guide,
"Technical Specifications per Compute Capability"). A launch that needs more fails."""


def test_attention_fits_gpus_for_desktops() -> None:
    # A fresh process: this one interprets the kernels, or may.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_models.engine.kernels.shared_memory"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    taken = json.loads(done.stdout)
    assert taken.keys() == {"_decode", "_share_out", "_prefill"}
    assert max(taken.values()) <= DESKTOP
