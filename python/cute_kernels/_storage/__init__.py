"""Compressed storage: its tensors, how they are made, read, checked and saved. Knows no public class."""
