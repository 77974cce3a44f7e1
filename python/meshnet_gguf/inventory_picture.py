"""A picture of a model: one bar a layer, its bytes by class, and the stages of a split above.

    svg = render(inventory, ((0, 22), (22, 43)))

Equal inventories give equal bytes.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from meshnet_gguf.inventory import Inventory, TensorClass

__all__ = ["render"]

_COLOURS = {
    TensorClass.EMBEDDING: "#4c72b0",
    TensorClass.HEAD: "#64b5cd",
    TensorClass.MHC: "#8c613c",
    TensorClass.NORM: "#999999",
    TensorClass.ATTENTION: "#dd8452",
    TensorClass.ATTENTION_WINDOW: "#f0b27a",
    TensorClass.ATTENTION_CSA: "#dd8452",
    TensorClass.ATTENTION_HCA: "#b8520f",
    TensorClass.COMPRESSOR: "#da8bc3",
    TensorClass.INDEXER: "#8172b3",
    TensorClass.FEED_FORWARD: "#55a868",
    TensorClass.ROUTER: "#c44e52",
    TensorClass.EXPERT: "#55a868",
    TensorClass.SHARED_EXPERT: "#2e7d46",
    TensorClass.ROPE: "#cccccc",
    TensorClass.MTP: "#444444",
}
_WIDTH = 960
_LEFT = 70
_PLOT_TOP = 60
_PLOT_HEIGHT = 260
_BASE = _PLOT_TOP + _PLOT_HEIGHT
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render(inventory: Inventory, split: Sequence[tuple[int, int]]) -> str:
    """The SVG. Columns are the embedding, each layer (MTP's last) and the head."""
    columns = _columns(inventory)
    top = max(sum(classes.values()) for _, classes in columns) or 1
    step = (_WIDTH - _LEFT - 10) / len(columns)
    used = [kind for kind in TensorClass if any(kind in classes for _, classes in columns)]
    rows = -(-len(used) // 6)
    height = _BASE + 40 + rows * 18
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'font-family="sans-serif" font-size="11">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(_LEFT, 18, f"{inventory.architecture}: bytes per layer", "start", 14),
    ]
    for quarter in range(5):
        y = _BASE - _PLOT_HEIGHT * quarter / 4
        parts.append(
            f'<line x1="{_LEFT}" y1="{y:.1f}" x2="{_WIDTH - 10}" y2="{y:.1f}" stroke="#dddddd"/>'
        )
        parts.append(_text(_LEFT - 6, y + 4, _size(top * quarter / 4), "end"))
    every = max(1, -(-len(columns) // 30))
    for number, (name, classes) in enumerate(columns):
        x = _LEFT + number * step
        base = float(_BASE)
        for kind, size in classes.items():
            tall = size / top * _PLOT_HEIGHT
            base -= tall
            parts.append(
                f'<rect x="{x + step * 0.1:.1f}" y="{base:.2f}" width="{step * 0.8:.1f}" '
                f'height="{tall:.2f}" fill="{_COLOURS[kind]}">'
                f"<title>{html.escape(name)}, {kind}: {_size(size)}</title></rect>"
            )
        if not name.isdecimal() or int(name) % every == 0:
            parts.append(_text(x + step / 2, _BASE + 14, name, "middle", 9))
    for stage, (begin, end) in enumerate(split):
        left, right = _LEFT + (begin + 1) * step, _LEFT + (end + 1) * step
        parts.append(
            f'<path d="M{left + 2:.1f} 46 V40 H{right - 2:.1f} V46" fill="none" stroke="#222222"/>'
        )
        label = f"stage {stage}: {_size(inventory.stage_bytes((begin, end)))}"
        parts.append(_text((left + right) / 2, 36, label, "middle"))
    for number, kind in enumerate(used):
        x = _LEFT + number % 6 * 145
        y = _BASE + 30 + number // 6 * 18
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{_COLOURS[kind]}"/>')
        parts.append(_text(x + 16, y + 10, str(kind), "start"))
    return "\n".join([*parts, "</svg>", ""])


def _columns(inventory: Inventory) -> list[tuple[str, dict[TensorClass, int]]]:
    names = ["embd", *(str(layer.index) for layer in inventory.layers), "head"]
    columns: list[tuple[str, dict[TensorClass, int]]] = [(name, {}) for name in names]
    for item in inventory.items:
        if item.layer is not None:
            place = item.layer + 1
        else:
            place = 0 if item.kind in (TensorClass.EMBEDDING, TensorClass.ROPE) else -1
        classes = columns[place][1]
        classes[item.kind] = classes.get(item.kind, 0) + item.tensor.bytes
    return columns


def _text(x: float, y: float, text: str, anchor: str, size: int = 11) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">'
        f"{html.escape(text)}</text>"
    )


def _size(size: float) -> str:
    unit = 0
    while size >= 1024 and unit < len(_UNITS) - 1:
        size /= 1024
        unit += 1
    return (
        f"{size:.0f} {_UNITS[unit]}" if size >= 100 or unit == 0 else f"{size:.1f} {_UNITS[unit]}"
    )
