"""One file per tensor contract: our request type to tensors, tensors to our events."""
