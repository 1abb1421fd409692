"""A plain SVG of how many responses are longer than so many tokens, one line a sample of lengths."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 720, 400, 64, 24, 48, 56
#: (colour, width, dashes) of the lines, in order: a wide light one may lie under a narrow dark one.
_STYLES = (("#9ecae1", 7, ""), ("#08306b", 2, "6 4"), ("#d94801", 3, ""))


def survival_svg(title: str, samples: Mapping[str, Sequence[int]]) -> str:
    """At most three samples, none empty. The vertical axis is logarithmic, so that the tail can be seen."""
    longest = max(max(lengths) for lengths in samples.values())
    smallest = min(1 / len(lengths) for lengths in samples.values())
    decades = math.ceil(-math.log10(smallest))

    def x(tokens: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * tokens / longest

    def y(share: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * -math.log10(share) / decades

    step = _round_step(longest / 6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="26" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for decade in range(decades + 1):
        share = 10.0**-decade
        parts += _grid(_LEFT, y(share), _WIDTH - _RIGHT, y(share))
        parts.append(f'<text x="{_LEFT - 8}" y="{y(share) + 4:.1f}" text-anchor="end">{100 * share:g}%</text>')
    for tokens in range(0, longest + 1, step):
        parts += _grid(x(tokens), _TOP, x(tokens), _HEIGHT - _BOTTOM)
        parts.append(f'<text x="{x(tokens):.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{tokens}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{_HEIGHT - 14}" text-anchor="middle">response longer than (tokens)</text>')
    for index, (name, lengths) in enumerate(samples.items()):
        colour, width, dashes = _STYLES[index]
        line = f'stroke="{colour}" stroke-width="{width}" stroke-dasharray="{dashes}" fill="none"'
        points = " ".join(f"{x(tokens):.1f},{y(share):.1f}" for tokens, share in _steps(lengths))
        parts.append(f'<polyline points="{points}" {line}/>')
        row = _TOP + 18 + 20 * index
        parts.append(f'<line x1="{_WIDTH - 340}" y1="{row}" x2="{_WIDTH - 300}" y2="{row}" {line}/>')
        parts.append(f'<text x="{_WIDTH - 290}" y="{row + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _steps(lengths: Sequence[int]) -> list[tuple[int, float]]:
    """Corners of the curve: (tokens, share of lengths above), down to the last share that is not 0."""
    ordered = sorted(lengths)
    corners, share = [(0, 1.0)], 1.0
    for tokens in sorted(set(ordered)):
        corners.append((tokens, share))
        share = 1 - bisect.bisect_right(ordered, tokens) / len(ordered)
        if share > 0:
            corners.append((tokens, share))
    return corners


def _grid(x1: float, y1: float, x2: float, y2: float) -> list[str]:
    return [f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#dddddd"/>']


def _round_step(raw: float) -> int:
    """The next of 1, 2, 5, 10, 20, ... that is not below."""
    magnitude = 10 ** math.floor(math.log10(max(raw, 1)))
    return next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= raw)
