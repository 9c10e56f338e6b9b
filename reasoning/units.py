"""Units of measurement after a number: which spellings are of the same unit, and where the number ends."""

from __future__ import annotations

import re

_SPELLINGS = {
    "km": "km|kilomet(?:er|re)s?",
    "cm": "cm|centimet(?:er|re)s?",
    "mm": "mm|millimet(?:er|re)s?",
    "m": "m|met(?:er|re)s?",
    "mi": "mi|miles?",
    "yd": "yds?|yards?",
    "ft": "ft|foot|feet",
    "in": "in|inch|inches",
    "kg": "kg|kilograms?",
    "mg": "mg|milligrams?",
    "g": "g|grams?",
    "lb": "lbs?|pounds?",
    "oz": "oz|ounces?",
    "t": "tons?|tonnes?",
    "mL": "m[lL]|millilit(?:er|re)s?",
    "L": "[lL]|lit(?:er|re)s?",
    "gal": "gal|gallons?",
    "s": "s|secs?|seconds?",
    "min": "mins?|minutes?",
    "h": "h|hrs?|hours?",
    "d": "days?",
    "wk": "weeks?",
    "mo": "months?",
    "yr": "yrs?|years?",
    "mi/h": "mph",
    "km/h": "kph|kmh",
    "°C": r"(?:°|\^\{?\\circ\}?|degrees?)\s*(?:C|Celsius)|℃",
    "°F": r"(?:°|\^\{?\\circ\}?|degrees?)\s*(?:F|Fahrenheit)|℉",
    "°": r"°|\^\{?\\circ\}?|\\degree|deg|degrees?",
    "rad": "rad|radians?",
    "$": "dollars?|USD",
    "¢": "¢|cents?",
    "€": "euros?|EUR",
    "am": r"a\.m\.?|am|A\.M\.?|AM",
    "pm": r"p\.m\.?|pm|P\.M\.?|PM",
    "": "units?",
    "Hz": "Hz|hertz",
    "J": "J|joules?",
    "N": "N|newtons?",
    "W": "W|watts?",
    "V": "V|volts?",
}
_ANY = "|".join(_SPELLINGS.values())
_FACTOR = rf"(?:(?:sq(?:uare)?|cu(?:bic)?)\b\.?\s*)?(?:{_ANY})(?![A-Za-z])(?:\s*\^\s*\{{?-?\d\}}?)?"
UNIT = rf"{_FACTOR}(?:\s*(?:/|per\b)\s*{_FACTOR})?"
_MEASURED = re.compile(rf"(.*[\d}})\]])(\s*)({UNIT})")
_ONE = re.compile(rf"(?:(sq|cu)(?:uare|bic)?\b\.?\s*)?({_ANY})(?:\s*\^\s*\{{?(-?\d)\}}?)?")
_MONEY = re.compile(r"(-?)(\\?\$|€)\s?(-?[\d.,]*\d)")
_SPACE = re.compile(r"\\[,;:! ]|~")
_IN_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{2,}")


def measured(answer: str) -> tuple[str, str] | None:
    """The number or expression of an answer, and its unit by one name, as "km/h"; None where there is none of these.

    A letter that follows a number without a space is a variable, and "" the unit of "5 units". LaTeX's `\\text{}` is
    to be a space before.
    """
    answer = _SPACE.sub(" ", answer).strip().rstrip(".").strip()
    answer = answer[1:-1].strip() if len(answer) > 1 and answer[0] == answer[-1] == "$" else answer
    if money := _MONEY.fullmatch(answer):
        return money[1] + money[3], money[2].removeprefix("\\")
    found = _MEASURED.fullmatch(answer)
    if found is None or (not found[2] and re.fullmatch("[A-Za-z]", found[3])) or _IN_WORDS.search(found[1]):
        return None
    return found[1], name_of(found[3])


def name_of(unit: str) -> str:
    """The one name of a unit that matches `UNIT`: "km/h" of "kilometers per hour", "ft^2" of "square feet"."""
    return "/".join(_name_of_one(part.strip()) for part in re.split(r"/|\bper\b", unit))


def _name_of_one(unit: str) -> str:
    found = _ONE.fullmatch(unit)
    if found is None:
        return unit
    name = next(name for name, spellings in _SPELLINGS.items() if re.fullmatch(spellings, found[2]))
    power = found[3] or {"sq": "2", "cu": "3"}.get(found[1] or "", "1")
    return name if power == "1" or not name else f"{name}^{power}"
