"""Names of classes in any script, drawn over images with a font that has their characters."""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache

import cv2
import numpy as np
from matplotlib import font_manager, rcParams
from PIL import Image, ImageDraw, ImageFont

from vim_mm.progress import say

_CV2_FONT = cv2.FONT_HERSHEY_SIMPLEX


def drawable_names(classes: Sequence[str]) -> list[str]:
    """The names of classes, with '#3' for the fourth if no font of this machine can draw it.

    A line says which these are. Matplotlib draws the others with the same font from then on.
    """
    names = [str(name) for name in classes]
    font = _font_of(frozenset(''.join(names)))
    if font is None:
        known = _characters(_usual_font())
        missing = [name for name in names if not known >= _visible(name)]
        fonts = [font for name in missing if (font := _font_of(frozenset(name))) is not None]
        font = max(fonts, key=fonts.count, default=_usual_font())
        known = _characters(font)
        lacking = [i for i, name in enumerate(names) if not known >= _visible(name)]
        if lacking:
            shown = ', '.join(f'#{i} is {names[i]}' for i in lacking)
            say(f'no font of this machine has the characters of all classes: {shown}')
        names = [f'#{i}' if i in lacking else name for i, name in enumerate(names)]
    _use(font)
    return names


def put_name(
    image: np.ndarray, name: str, place: tuple[int, int], size: int, background: Sequence[int]
) -> None:
    """Draw a name into an image (H, W, 3), uint8, in place, on a rectangle that fits into it.

    Args:
        image (ndarray): Its channels are those of ``background``.
        name (str): As :func:`drawable_names` gives it.
        place (tuple[int, int]): (x, y) of the upper left corner; moved as far as the name needs.
        size (int): Height of the letters in pixels.
        background (Sequence[int]): The colour of the class; the letters are black or white on it.
    """
    label = _label(name, size, tuple(background))
    height, width = (min(n, most) for n, most in zip(label.shape[:2], image.shape[:2], strict=True))
    left = max(0, min(place[0], image.shape[1] - width))
    top = max(0, min(place[1], image.shape[0] - height))
    image[top : top + height, left : left + width] = label[:height, :width]


def draw_legend(colours: Mapping[str, Sequence[int]], width: int, size: int) -> np.ndarray:
    """What to put below an image: a swatch for each class and its name, in as many rows as needed.

    Args:
        colours (Mapping): By name, as :func:`drawable_names` gives it, three numbers in 0 to 255.
        width (int): Pixels; a name that does not fit is cut off.
        size (int): Height of the letters in pixels.

    Returns:
        ndarray: (H, width, 3), uint8, white; H is 0 without a class.
    """
    height, gap = 2 * size, size // 2
    rows: list[np.ndarray] = []
    left = width
    for name, colour in colours.items():
        label = _label(name, size, (255,) * 3)
        if left + size + 2 * gap + label.shape[1] > width:
            rows.append(np.full((height, width, 3), 255, np.uint8))
            left = gap
        row = rows[-1]
        row[gap : gap + size, left : left + size] = colour
        left += size + gap
        top = max(0, (height - label.shape[0]) // 2)
        part = row[top : top + label.shape[0], left : left + label.shape[1]]
        part[...] = label[: part.shape[0], : part.shape[1]]
        left += label.shape[1] + 2 * gap
    return np.concatenate(rows) if rows else np.zeros((0, width, 3), np.uint8)


@lru_cache(4096)
def _label(name: str, size: int, background: tuple[int, ...]) -> np.ndarray:
    colour = (0,) * 3 if sum(background) > 380 else (255,) * 3
    if name.isascii():
        scale = size / 22  # of OpenCV's letters at a scale of 1
        (width, height), below = cv2.getTextSize(name, _CV2_FONT, scale, 1)
        label = np.full((height + below, width, 3), background, np.uint8)
        origin = (0, height + below // 2)
        return cv2.putText(label, name, origin, _CV2_FONT, scale, colour, 1, cv2.LINE_AA)
    path = _font_of(frozenset(name)) or _usual_font()
    font = ImageFont.truetype(path, max(round(1.2 * size), 1))
    left, top, right, bottom = font.getbbox(name)
    picture = Image.new('RGB', (max(right - left + 2, 1), max(bottom - top + 2, 1)), background)
    ImageDraw.Draw(picture).text((1 - left, 1 - top), name, fill=colour, font=font)
    return np.array(picture)


def _usual_font() -> str:
    return font_manager.findfont(font_manager.FontProperties(family=['sans-serif']))


def _visible(text) -> set[int]:
    return {ord(each) for each in text if not each.isspace()}


@cache
def _characters(font: str) -> frozenset[int]:
    return frozenset(font_manager.get_font(font).get_charmap())


@cache
def _font_of(characters: frozenset[str]) -> str | None:
    """The file of a font that has all characters: Matplotlib's own if it has them."""
    needed = _visible(characters)
    usual = _usual_font()
    if _characters(usual) >= needed:
        return usual
    for entry in font_manager.fontManager.ttflist:
        if entry.style != 'normal' or entry.weight not in (400, 'normal', 'regular'):
            continue
        try:
            if _characters(entry.fname) >= needed:
                return entry.fname
        except (OSError, RuntimeError):  # a damaged file, or one that is gone
            continue
    return None


def _use(font: str) -> None:
    """Let Matplotlib, by which the libraries draw, take a font for its sans-serif."""
    name = font_manager.get_font(font).family_name
    others = [each for each in rcParams['font.sans-serif'] if each != name]
    rcParams['font.sans-serif'] = [name, *others]
