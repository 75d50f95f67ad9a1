"""Command lines: parsers and checks of options. These modules import little, so that --help is fast.

A command's module has `PROG`, `parser(prog)` and `main(argv, prog)`, which checks the options before slow imports.
`hostdev NAME` is the same as `python -m` with the module in `COMMANDS`.
"""

COMMANDS = {  # module and help text by name
    "train": ("hostdev.train", "train a model on a data set"),
    "quickstart": ("hostdev.train.quickstart", "preprocess Criteo text, or synthetic data, and train on it"),
    "preprocess": (
        "hostdev.data.preprocess",
        "turn tables or Criteo text into a data set; check or describe one",
    ),
    "report": ("hostdev.report", "write a page with the charts and tables of runs"),
    "predict": ("hostdev.predict", "write probabilities for the rows of a file"),
    "neighbours": ("hostdev.neighbours", "print the nearest rows of an embedding table"),
    "serve": ("hostdev.serving", "answer requests for predictions over HTTP"),
    "checkpoint": ("hostdev.checkpoint", "describe, check, compare, merge and export checkpoints"),
    "advise": ("hostdev.advise", "recommend an embedding cache for your data"),
    "verify": ("hostdev.verify", "show on your data that every mode gives the same bits"),
    "warm-up": ("hostdev.warm_up", "compile all kernels now, for example for a container image"),
    "launch": ("hostdev.launch", "start the processes that a rank table assigns to this host; test the connections"),
}
