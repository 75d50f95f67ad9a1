"""Conversion of tables, Criteo text and synthetic rows to Arrow shards; imported as hostdev.data.preprocess.

Rows come from the module table (with files, delimited and columns), criteo or synthetic, or from a registered source
(row_source) such as query. The module first_pass parses them into pieces and assigns splits; learning finds the
vocabulary and the scaling; second_pass encodes the rows; build runs all of this.
"""
