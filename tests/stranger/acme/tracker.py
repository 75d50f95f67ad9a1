"""A tracker that writes a line of JSON for each value."""

import json

from hostdev.tracking import Tracker


class JsonLines(Tracker):
    """Writes RUN/acme.jsonl."""

    name = "jsonl"

    def __init__(self):
        self._file = None

    def on_start(self, run):
        """Open the file."""
        self._file = (run.run_dir / "acme.jsonl").open("a")

    def add_scalar(self, tag, value, global_step):
        """Write a value."""
        self._file.write(json.dumps({"tag": tag, "value": value, "step": global_step}) + "\n")

    def add_histogram(self, tag, values, global_step):
        """Write the largest value."""
        self.add_scalar(f"{tag}/max", float(values.max()), global_step)

    def on_end(self, end):
        """Write how the run ended."""
        self._file.write(json.dumps({"status": end.status}) + "\n")

    def close(self):
        """Close the file."""
        if self._file is not None:
            self._file.close()
