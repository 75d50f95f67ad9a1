"""Rows selected by an SQL query, which DuckDB runs, in a deterministic order.

`engine` configures DuckDB and adds SQL functions, `statement` is a query's parse tree, `allowed` refuses what could
have another result, `settle` rewrites the tree so that its result does not depend on threads, `plan` finds files, joins
and expressions whose value depends on threads, and `source` reads the rows. `readers` completes the functions that read
files (`from_clause`), so that all values of a column decide its type, also in several Parquet files; `spelling` finds
the types of texts. `raw_rows` computes the columns of rows to predict (with `by_row`, `raw_files` and `raw_values`).
"""

NAME = "the query"  # in messages, where other sources have a file's name
