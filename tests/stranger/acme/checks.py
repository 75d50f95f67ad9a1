"""`python -m acme.checks FOLDER`: everything of this package passes hostdev's checks."""

import sys
from pathlib import Path

from acme.exporter import Text
from acme.rules import Even, Rarest
from acme.source import MadeUp
from acme.tracker import JsonLines
from hostdev import testing


def main(folder):
    """Run the checks."""
    testing.check_admission(Even())
    testing.check_eviction(Rarest())
    testing.check_source(MadeUp(2500))
    testing.check_tracker(JsonLines, folder)
    testing.check_exporter(Text, "--upper")
    testing.check_model("acme")
    print("all checks passed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
