"""Conversion of tables, Criteo text and synthetic rows to Arrow shards; imported as hostdev.data.preprocess.

Rows pass through table (files, delimited, columns), criteo or synthetic, then raw, then the first pass (test split,
vocabulary, scaling), then the second pass (shards).
"""
