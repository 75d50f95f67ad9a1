"""python -m hostdev COMMAND: the same as the program `hostdev`."""

if __name__ == "__main__":
    from hostdev.commands.console import main

    raise SystemExit(main())
