"""A load of requests through a serving engine: `python -m profiling.serving_load`."""
