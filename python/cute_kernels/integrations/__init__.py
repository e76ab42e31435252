"""Adapters for other libraries; each module imports its library, which is an optional extra of this package."""
