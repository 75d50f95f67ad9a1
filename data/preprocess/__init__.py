"""Any table, Criteo text, or a synthetic look-alike, to Arrow shards; imported as hostdev.data.preprocess.

The way of a row: table (files, delimited, columns), criteo or synthetic -> raw -> split, vocabulary and dense (first
pass) -> shards (second pass).
"""
