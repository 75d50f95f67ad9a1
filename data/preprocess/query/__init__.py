"""Rows selected by an SQL query, which DuckDB runs, in a deterministic order.

`engine` configures DuckDB and adds SQL functions, `statement` is a query's parse tree, `allowed` refuses what could
have another result, `settle` rewrites the tree so that its result does not depend on threads, `plan` finds files, joins
and expressions whose value depends on threads, and `source` reads the rows. `readers` completes the functions that read
files (`from_clause`), so that all values of a column decide its type: `spelling` finds types of texts, and
`parquet_files` compares those of several files.
"""

NAME = "the query"  # in messages, where other sources have a file's name
