"""Whether a JSON value is of the shape that its reader goes by."""

import math
from typing import get_args

WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def misfit(value, shape, at: str = "") -> str | None:
    """What of a JSON value is not of a shape, or None.

    shape: a type, of which `float` is any finite number and `object` anything that is there, or
    such a type or None; a set of the texts that it may be; [shape], a list of such; {key: shape},
    an object that has these keys, and of `str` as a key, whose every other value is such;
    (shape,), such a value or null.
    """
    if isinstance(shape, tuple):
        return None if value is None else misfit(value, shape[0], at)
    place = at[:-1] or "it"
    if isinstance(shape, set):
        words = ", ".join(sorted(shape))
        return None if value in list(shape) else f"{place} is {value!r:.40}, not one of {words}"
    if isinstance(shape, dict):
        if not isinstance(value, dict):
            return f"{place} is {str(value)[:40]}, not an object"
        if missing := [key for key in shape if key is not str and key not in value]:
            return f"{at}{missing[0]} is missing"
        parts = [(k, v, shape.get(k, shape.get(str, object))) for k, v in value.items()]
    elif isinstance(shape, list):
        if not isinstance(value, list):
            return f"{place} is {str(value)[:40]}, not a list"
        parts = [(number, part, shape[0]) for number, part in enumerate(value)]
    else:
        kinds = get_args(shape) or (shape,)
        taken = (*kinds, int) if float in kinds else kinds
        fits = isinstance(value, taken) and isinstance(value, bool) <= (bool in kinds)
        fits = fits and not (isinstance(value, float) and not math.isfinite(value))
        return (
            None if fits or shape is object else f"{place} is {value!r:.40}, not {WORDS[kinds[0]]}"
        )
    return next(filter(None, (misfit(v, of, f"{at}{k}.") for k, v, of in parts)), None)
