"""The upstream on Triton: channels, replicas and their health, statuses, control."""
