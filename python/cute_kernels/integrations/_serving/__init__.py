"""What serving engines have in common: steps of many requests, and attention of a layer over an engine's blocks."""
