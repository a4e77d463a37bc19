"""How a batch crosses a process border: the arena, leases on it, and the codec."""
