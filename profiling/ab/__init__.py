"""Speed of two builds, case by case, in one run: python -m profiling.ab BASE_CHECKOUT [NEW_CHECKOUT]."""
