"""Images, and what their containers run."""
