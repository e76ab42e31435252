"""The tests, a folder a subject; `support` holds what several of them share."""
