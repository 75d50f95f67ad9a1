"""The command line of `launch`."""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hostdev.core import cli
from hostdev.core.addresses import local_path, require_input
from hostdev.core.errors import UserError
from hostdev.distributed.rank_environment import read_table
from hostdev.ext.launch.start import PROG, check, find_server, start

HELP = "start the processes that a rank table assigns to this host; test the connections"


def parser(prog: str = PROG) -> cli.Parser:
    """Return the parser of the command's flags."""
    made = cli.parser(
        prog, "Start the processes that a rank table assigns to this host; give the program and its options after --."
    )
    made.inputs["rank_table"] = partial(require_input, said="rank table {}: No such file or directory")
    made.add_argument(
        "--rank-table",
        type=cli.checked(local_path),
        metavar="FILE",
        help="JSON file with the servers and their devices",
    )
    made.add_argument(
        "--server", metavar="ID", help="this host's server_id in the table (default: found by name or address)"
    )
    made.add_argument(
        "--log-dir",
        type=cli.checked(local_path),
        metavar="DIR",
        help="a new folder for the logs of the ranks (default launch-<time>)",
    )
    made.add_argument("--check", action="store_true", help="test and time the connections; works under any launcher")
    return made


def main(argv: Sequence[str], prog: str = PROG) -> int:
    """Parse the command line and start processes, or check their connections."""
    own, command = list(argv), []
    if "--" in own:
        at = own.index("--")
        own, command = own[:at], own[at + 1 :]
    options = parser(prog).parse_args(own)
    if options.check and command:
        raise UserError("--check starts no program; leave out -- and everything after it")
    if options.rank_table is None:
        for name in ("server", "log_dir"):
            if getattr(options, name) is not None:
                raise UserError(
                    f"--{name.replace('_', '-')} has no effect without --rank-table; "
                    f"leave out --{name.replace('_', '-')}"
                )
        if not options.check:
            raise UserError("give --rank-table FILE -- PROGRAM OPTIONS, or --check to test connections")
        return check()
    if not command and not options.check:
        raise UserError("missing command after --, such as -- -m hostdev.train --host-device-mix ...")
    if options.check:
        command = ["-m", PROG, "--check"]
    table = read_table(options.rank_table)
    server = find_server(table, options.server, options.rank_table)
    folder = options.log_dir or Path(time.strftime("launch-%Y%m%d-%H%M%S"))
    return start(options.rank_table, table, server, command, folder)
