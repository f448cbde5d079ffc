"""SVG elements of the pictures of plans, with texts escaped, and the colours that all pictures share."""

from __future__ import annotations

from html import escape

INK, MUTED, TRANSFER = "#1b2330", "#5f6b7c", "#c75d1c"


def opening(width: int, height: int) -> str:
    """Return the start of a picture, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    )


def titled(title: str, *elements: str) -> str:
    """Return elements with a tooltip."""
    return f"<g><title>{escape(title)}</title>{''.join(elements)}</g>"


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1.0, stroke: str = "none"
) -> str:
    """Return a rectangle; ``x`` and ``y`` are of its upper left corner."""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" fill="{fill}" '
        f'fill-opacity="{opacity}" stroke="{stroke}"/>'
    )


def text(
    x: float,
    y: float,
    content: str,
    fill: str,
    *,
    size: int = 12,
    weight: int = 400,
    anchor: str = "start",
    halo: bool = False,
) -> str:
    """Return a line of text on its base line; ``halo`` adds a white edge, over other elements."""
    edge = ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{edge}>{escape(content)}</text>'
    )
