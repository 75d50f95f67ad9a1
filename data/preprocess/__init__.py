"""Conversion of tables, Criteo text and synthetic rows to Arrow shards; imported as hostdev.data.preprocess.

Rows come from the module table (with files, delimited and columns), criteo or synthetic. The module first_pass parses
them into pieces and assigns splits; second_pass learns the vocabulary and the scaling, and encodes the rows; build runs
both passes.
"""
