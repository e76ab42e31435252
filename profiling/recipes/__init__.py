"""Models trained here, to measure what pruning does to them."""
