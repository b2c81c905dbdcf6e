"""What holds for every test."""

import os
from pathlib import Path

from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    # Read when triton is first imported, whoever does that first: without a GPU, kernels are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Read when torch is first imported, here and in every server of the tests: models are small, many run side
# by side, and threads that wait for their share of a small product take the processors from the others.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# No example is timed: the machines that run this are shared. The examples are the same in every run, so that
# a failure is the change's and not the day's.
settings.register_profile("tritongate", deadline=None, derandomize=True)
settings.load_profile("tritongate")
