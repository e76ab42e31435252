"""Hardware counters of a sweep's cases, by way of Nsight Compute."""
