"""`hostdev report`: one page with the charts and tables of runs, made from their run directories."""
