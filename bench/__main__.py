"""`python -m bench NAME [options]`: run a benchmark. Without a name, list them."""

import argparse
import subprocess
import sys
from difflib import get_close_matches
from importlib import import_module

from bench.registry import BENCHES


def show() -> None:
    """Print the names and claims."""
    print("python -m bench NAME [options]; NAME --help explains a benchmark; --all runs those of `make bench`\n")
    for name, bench in BENCHES.items():
        print(f"  {name:<11} {bench.claim}")


def run(name: str, options: list[str]) -> int:
    """Run a benchmark in this process; return its exit code."""
    sys.argv = [f"-m bench {name}", *options]
    return import_module(f"bench.{BENCHES[name].module}").main() or 0


def run_all(criteo: str | None) -> int:
    """Run every regular benchmark in a process of its own, until one fails; return its exit code."""
    for name, bench in BENCHES.items():
        if bench.regular:
            more = ["--criteo", criteo] if criteo and bench.takes_criteo else []
            print(f"\n== {name}: {bench.claim}", flush=True)
            done = subprocess.run([sys.executable, "-m", "bench", name, *bench.options, *more], check=False)
            if done.returncode:
                return done.returncode
    return 0


def main() -> int:
    """Run what the command line names."""
    arguments = sys.argv[1:]
    if not arguments:
        show()
        return 0
    if arguments[0] in BENCHES:
        return run(arguments[0], arguments[1:])
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run a benchmark; without a name, list them.")
    parser.add_argument("name", nargs="?", metavar="NAME", help="a benchmark; its own options follow")
    parser.add_argument("--all", action="store_true", help="run the benchmarks of `make bench`")
    parser.add_argument("--criteo", help="with --all: Criteo text for the benchmark `preprocess`")
    given = parser.parse_args()
    if given.name is not None:
        near = get_close_matches(given.name, BENCHES, 1)
        parser.error(f"no benchmark {given.name!r}{f'; did you mean {near[0]}?' if near else ''}")
    if not given.all:
        parser.error("give a NAME or --all")
    return run_all(given.criteo)


if __name__ == "__main__":
    sys.exit(main())
