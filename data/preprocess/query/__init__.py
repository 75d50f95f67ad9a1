"""Rows that an SQL query selects: DuckDB runs it, in an order that is always the same.

`engine` holds DuckDB and the functions that it gets, `statement` is a query's parse tree, `settle` rewrites it so that
its result does not depend on threads, `plan` finds what still does, and `source` reads the rows.
"""
