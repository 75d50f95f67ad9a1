"""Rows selected by an SQL query, which DuckDB runs, in a deterministic order.

`engine` configures DuckDB and adds SQL functions, `statement` is a query's parse tree, `settle` rewrites it so that its
result does not depend on threads, `plan` finds expressions whose value still depends on them, and `source` reads the
rows.
"""

NAME = "the query"  # in messages, where other sources have a file's name
