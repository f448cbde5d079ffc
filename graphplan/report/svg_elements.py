"""What pictures of plans are made of: the elements of SVG, with texts escaped, and the colours of all."""

from __future__ import annotations

from html import escape

INK, MUTED, TRANSFER = "#1b2330", "#5f6b7c", "#c75d1c"


def opening(width: int, height: int) -> str:
    """The begin of a picture, on white."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="12">\n'
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
    )


def titled(title: str, *elements: str) -> str:
    """Elements that say something where the pointer rests on them."""
    return f"<g><title>{escape(title)}</title>{''.join(elements)}</g>"


def rect(
    x: float, y: float, width: float, height: float, fill: str, *, opacity: float = 1.0, stroke: str = "none"
) -> str:
    """A rectangle, from its left upper corner."""
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
    """A line of text on its base line; ``halo``: with a white edge, over other elements."""
    around = ' stroke="#fff" stroke-width="3" paint-order="stroke"' if halo else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}" font-size="{size}" font-weight="{weight}" '
        f'text-anchor="{anchor}"{around}>{escape(content)}</text>'
    )
