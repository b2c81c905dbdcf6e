"""How a gateway runs: its process or processes, their sockets and signals, and who takes their place."""
