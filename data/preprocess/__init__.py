"""Criteo text, or a synthetic look-alike, to Arrow shards; imported as hostdev.data.preprocess.

The way of a row: criteo (or synthetic) -> raw -> split, vocabulary and dense (first pass) -> shards (second pass).
"""
