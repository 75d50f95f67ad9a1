"""python -m hostdev.report: write a page with the charts and tables of runs."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.report.cli", "hostdev.report"))
