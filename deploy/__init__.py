"""What runs tritongate in production, and the scripts that make and check it."""
