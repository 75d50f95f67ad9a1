"""python -m hostdev.serving: answer requests for predictions over HTTP."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.serving.cli", "hostdev.serving"))
