"""Draw docs/batch.svg, the way of a batch through threads and stages: python docs/batch.py."""

from pathlib import Path

PICTURE = Path(__file__).with_name("batch.svg")
WIDTH, HEIGHT = 1000, 436
LANES = [  # the title of a lane, its top and its height
    ("the caller's thread", 16, 100),
    ("fetcher", 124, 92),
    ("updater", 224, 92),
    ("rows", 324, 92),
]
BOXES = [  # left, top, width, height, title, what leaves it
    (140, 40, 120, 54, "read", "ids [N]"),
    (140, 144, 120, 54, "deduplicate", "unique ids [U]"),
    (310, 144, 120, 54, "plan", "conflicts, cached rows"),
    (480, 144, 120, 54, "look up", "rows [M, D]"),
    (650, 144, 120, 54, "send", "pinned copies"),
    (600, 32, 384, 70, "step, on the device", "assemble · pool · your loop's body · sum · check · cache"),
    (780, 244, 130, 54, "update", "gradients [M, D]"),
    (430, 344, 220, 54, "host tables", "in memory or on disk"),
    (720, 344, 264, 54, "cache slots", "on the device; the step reads and updates them"),
]
ARROWS = [  # a path, its label and where it stands
    ("M200 94V140", "ReadBatch", 206, 121),
    ("M260 171H306", "UniqueBatch", 250, 139),
    ("M430 171H476", "PlannedBatch", 418, 139),
    ("M600 171H646", "LookedUpBatch", 584, 139),
    ("M710 144V106", "SentBatch", 716, 121),
    ("M850 102V240", "SteppedBatch", 856, 176),
    ("M540 344V202", "rows", 546, 278),
    ("M780 284H620V340", "updated rows", 626, 300),
    ("M950 102V340", "rows", 956, 230),
]
DASHED = ("M780 258H580V202", "rows that a later batch waits for", 592, 252)


def draw() -> str:
    """Return the picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="13"><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        '<marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#333"/></marker>',
    ]
    for title, top, height in LANES:
        parts.append(f'<rect x="4" y="{top}" width="992" height="{height}" rx="6" fill="#f3f4fb"/>')
        parts.append(f'<text x="12" y="{top + height // 2 + 4}" fill="#555">{title}</text>')
    for path, label, x, y in [*ARROWS, DASHED]:
        dash = ' stroke-dasharray="5 4"' if path == DASHED[0] else ""
        parts.append(f'<path d="{path}" fill="none" stroke="#333"{dash} marker-end="url(#a)"/>')
        parts.append(f'<text x="{x}" y="{y}" font-size="11" fill="#333">{label}</text>')
    for left, top, width, height, title, leaves in BOXES:
        middle = left + width // 2
        parts.append(
            f'<rect x="{left}" y="{top}" width="{width}" height="{height}" rx="5" fill="#fff" stroke="#3f51b5"/>'
        )
        parts.append(
            f'<text x="{middle}" y="{top + height // 2 - 4}" text-anchor="middle" font-weight="bold">{title}</text>'
        )
        parts.append(
            f'<text x="{middle}" y="{top + height // 2 + 14}" text-anchor="middle" font-size="11">{leaves}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    PICTURE.write_text(draw())
