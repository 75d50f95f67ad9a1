"""Draws docs/figures.svg from the first table of docs/figures.md: python docs/chart.py."""

import math
import re
from html import escape
from pathlib import Path

PAGE, CHART = Path(__file__).with_name("figures.md"), Path(__file__).with_name("figures.svg")
LABELS, WIDTH, LEFT, STEP = 390, 330, math.log2(0.7), 24  # pixels; the axis begins at 0.7 and ends at 32


def draw() -> str:
    """Return the chart: a bar from the least to the most of each row, on a logarithmic axis."""
    table = PAGE.read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d.]+) to ([\d.]+) \|$", table, flags=re.MULTILINE)
    bottom = 8 + STEP * len(rows)

    def x(times: float) -> float:
        return LABELS + (math.log2(times) - LEFT) / (5 - LEFT) * WIDTH

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {bottom + 44}" font-family="sans-serif" '
        f'font-size="13"><rect width="800" height="{bottom + 44}" fill="#fff"/>'
    ]
    for times in (1, 2, 4, 8, 16, 32):
        color = "#333" if times == 1 else "#ddd"
        parts.append(f'<path d="M{x(times):.0f} 4V{bottom}" stroke="{color}"/>')
        parts.append(f'<text x="{x(times):.0f}" y="{bottom + 16}" text-anchor="middle">{times}x</text>')
    for number, (what, beside, least, most) in enumerate(rows):
        y, left, right = 8 + STEP * number, x(float(least)), x(float(most))
        label = escape(f"{what} / {beside}")
        parts.append(f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{label}</text>')
        parts.append(f'<rect x="{left:.0f}" y="{y + 3}" width="{right - left:.0f}" height="14" fill="#3f51b5"/>')
        parts.append(f'<text x="{right + 5:.0f}" y="{y + 14}">{least} to {most}</text>')
    parts.append(f'<text x="{x(4):.0f}" y="{bottom + 36}" text-anchor="middle">times as fast</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    CHART.write_text(draw())
