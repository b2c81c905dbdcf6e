"""What holds for every test."""

from hypothesis import settings

# No example is timed: the machines that run this are shared. The examples are the same in every run, so that
# a failure is the change's and not the day's.
settings.register_profile("tritongate", deadline=None, derandomize=True)
settings.load_profile("tritongate")
