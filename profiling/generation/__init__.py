"""Parts of `python -m profiling.generate`: models, runs of one batch, rows and their files."""
