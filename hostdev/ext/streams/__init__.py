"""Streams: training on files that arrive in a folder."""
