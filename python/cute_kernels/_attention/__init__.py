"""What `sparse_attention` and the caches share: a packed problem, its launch, checks, the reference."""
