"""python -m hostdev.warm_up: compile all kernels, in several processes, so that no command has to wait for them."""

if __name__ == "__main__":  # `run_module` does the slow imports, so that Ctrl-C during an import prints one line
    from hostdev.core import cli

    raise SystemExit(cli.run_module("hostdev.ext.warm_up.cli", "hostdev.warm_up"))
