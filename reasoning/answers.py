"""Whether an answer is right: by its text where that is enough, else by math-verify and SymPy.

`verdict` may compute for ever on a hostile answer, so it runs in the processes of `verifier.py` (this module is their
program) and nowhere else. What can be told without algebra, `plain_verdict`, is linear in the text.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from decimal import Decimal
from functools import lru_cache
from typing import Any

from reasoning.extraction import (
    DELIMITER,
    FUNCTIONS,
    MOST_CHARACTERS,
    POWERS,
    TEXT,
    bare,
    is_prose,
    quantity,
    unit_of,
    value_of,
    word_of,
)

MOST_BYTES = 2 << 30  # of address space that one process may use
CLEAR_EVERY = 100  # requests between two clearings of SymPy's caches
CLOSE = 1e-5  # relative distance of numbers that are equal but for rounding
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
_IS_NUMBER = re.compile(rf"(?=[-+]?\.?\d)[-+]?{_NUMBER}")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!; ](?=\d{3}(?!\d))")  # 10\,000
_UNIT = re.compile(
    r"(?<=[\w)}\]])(?:\\[,;:! ]|[\s~])*\\(?:text|textrm|mbox|mathrm)\s*\{"
    r"(?!\s*(?:percent|hundred|thousand|million|billion)\b)[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$"
)
_OPEN = re.compile(  # a relation, or a sum or a list, of which a side or an end is not said
    r"^[\s$]*(?:[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))|[-+*/=][\s$]*$|\\[lcv]?dots|…|\.\.\."
)
_IN_BASE = re.compile(r"([-+]?[0-9A-Z]+)_\{?(\d+)\}?")
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d+)\s+(\d+)/(\d+)(?![\w.,/^])")
_POWER_OF_TEN = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\overline\{(\d{1,30})\}")
_PERCENT = re.compile(rf"(?<![\w./^}}])(?=\.?\d)({_NUMBER})\s*(?:\\?%|percent\b)")
_SIGNS = str.maketrans(
    {"−": "-", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge "}
)
_NOTHING = {"", "?", "-", "n/a", "nan", "none", "null", "dne"}


def is_answer(gold: str) -> bool:
    """Whether a reference answer is mathematics, a number and its unit, a word or a choice, and not prose."""
    if gold.strip().lower() in _NOTHING or len(gold) > MOST_CHARACTERS:
        return False
    return not is_prose(gold) or word_of(gold) is not None or quantity(gold) is not None


def plain_verdict(prediction: str, gold: str) -> bool | None:
    """The verdict on two plain numbers, on a text or a choice, or on equal texts; None where it takes algebra."""
    word = word_of(gold)
    if word is not None:
        return bare(prediction).casefold() == word.casefold()
    if len({unit.lower()[:3] for text in (prediction, gold) if (unit := unit_of(text))}) > 1:
        return False
    if sum(bool(_OPEN.search(text)) for text in (prediction, gold)) == 1:
        return False
    numbers = [_plain(value_of(text)) for text in (prediction, gold)]
    if all(in_base := [_IN_BASE.fullmatch(number) for number in numbers]):
        return len({(found[1].lstrip("+"), found[2]) for found in in_base if found}) == 1
    if not all(_IS_NUMBER.fullmatch(number) for number in numbers):
        return True if _squeezed(prediction) == _squeezed(gold) else None
    ours, theirs = (Decimal(number.replace(",", "")) for number in numbers)
    return ours == theirs


def normal_form(answer: str) -> str:
    """A text that answers have in common that are written almost alike, as "x = 5.0" and "5"."""
    text = re.sub(r"^[A-Za-z]=", "", _squeezed(value_of(answer)))
    return str(Decimal(text.replace(",", "")).normalize()) if _IS_NUMBER.fullmatch(text) else text


def verdict(prediction: str, gold: str) -> bool | None:
    """Whether two answers are equal; None if the reference cannot be parsed. The order makes no difference."""
    texts = [re.sub(r"(?<!\\)\$", "", text) for text in (prediction, gold)]
    if sum(bool(_UNIT.search(text)) for text in texts) == 1:
        texts = [_UNIT.sub("", text) for text in texts]
    ours, theirs = (_parse(text) for text in texts)
    if theirs is None or ours is None:
        return None if theirs is None else False
    if _is_ordered(ours, theirs):
        ours, theirs = theirs, ours
    return _equal(theirs, ours) or (not _is_ordered(theirs, ours) and _equal(ours, theirs))


def _plain(text: str) -> str:
    text = re.sub(r"\\?\$|[€£]", "", TEXT.sub(r"\1", text)).translate(_SIGNS)
    text = re.sub(r"(?<![\w)])–(?=[\d.])", "-", text)
    text = re.sub(r"[⁰¹²³⁴-⁹]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅓-⅞])", " ", text)
    text = re.sub(r"[¼-¾⅓-⅞]", lambda found: unicodedata.normalize("NFKC", found[0]).replace("⁄", "/"), text)
    text = DELIMITER.sub("", _THIN_SPACE.sub("", text)).strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def _squeezed(text: str) -> str:
    text = re.sub(r"\s+|\\left|\\right|\\[,;:! ]", "", _plain(text))
    return re.sub(r"\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))", r"(\1\2/\3\4)", text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    from math_verify import parse

    text = re.sub(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1", _plain(text))
    text = re.sub(r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(rf"(?<=\d)\s*({'|'.join(POWERS)})\b", lambda found: rf" \times 10^{POWERS[found[1]]}", text)
    text = _REPEATING.sub(_fraction, text)
    text = _MIXED.sub(r"(\1+\2/\3)", _POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text))
    text = re.sub(r"√\s*(\d+|[a-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    text = _PERCENT.sub(r"(\1/100)", text)
    text = re.sub(r"([^=]+?)\s*(?:\\?%|percent)\s*$", r"\\frac{\1}{100}", text)
    found = parse(f"${text}$", parsing_timeout=None, fallback_mode="no_fallback")
    return found[0] if found else None


def _fraction(repeating: re.Match[str]) -> str:
    """Of 0.1\\overline{6}: 15/90."""
    whole, before, period = repeating.groups()
    value = int(whole + before + period) - int(whole + before or 0)
    return f"({value}/{10 ** len(before) * (10 ** len(period) - 1)})"


def _is_ordered(gold: Any, prediction: Any) -> bool:
    """Whether the one is a tuple, as (1, 2), and the other numbers in some order, as 2, 1."""
    import sympy

    return isinstance(gold, sympy.Tuple | sympy.Interval) and isinstance(prediction, sympy.FiniteSet)


def _equal(gold: Any, prediction: Any) -> bool:
    from math_verify import verify

    is_equal = verify(gold, prediction, timeout_seconds=None) and not _are_apart(gold, prediction)
    return is_equal or _equal_for_positive(gold, prediction)


def _are_apart(gold: Any, prediction: Any) -> bool:
    """Whether two numbers, which are rounded to six decimals when they are compared, differ for their size."""
    import sympy

    ours, theirs = (side.rhs if isinstance(side, sympy.Equality) else side for side in (gold, prediction))
    if ours == theirs or not all(isinstance(side, sympy.Expr) and side.is_number for side in (ours, theirs)):
        return False
    sizes = [abs(sympy.N(side)) for side in (ours, theirs)]
    if any(
        size.is_infinite for size in sizes
    ):  # of these `equals`, which tries numbers at random, now and then says yes
        return bool(sizes[0] != sizes[1])
    return bool(abs(sympy.N(ours - theirs)) > CLOSE * min(sizes)) and not ours.equals(theirs)


def _equal_for_positive(gold: Any, prediction: Any) -> bool:
    """Whether two expressions are equal for positive variables, where i is the imaginary unit."""
    import sympy

    if not all(isinstance(side, sympy.Expr) for side in (gold, prediction)):
        return False
    names = {symbol.name for symbol in gold.free_symbols | prediction.free_symbols}
    stands_for = {name: sympy.Dummy(name, positive=True) for name in names} | {"i": sympy.I}
    ours, theirs = (
        side.xreplace({symbol: stands_for[symbol.name] for symbol in side.free_symbols}).doit()
        for side in (gold, prediction)
    )
    if not names or ours.free_symbols != theirs.free_symbols:
        return False
    difference = ours - theirs
    if sympy.simplify(sympy.nsimplify(difference, rational=True)) != 0:
        return False
    # x and |x| are equal for positive variables only, and both defined for others
    negative = {name: sympy.I if name == "i" else -sympy.Integer(n) for n, name in enumerate(sorted(names), start=2)}
    sides = [side.subs({symbol: negative[symbol.name] for symbol in side.free_symbols}) for side in (gold, prediction)]
    return bool(not all(side.is_real for side in sides) or abs(sympy.N(sides[0] - sides[1])) < 1e-6)


def main() -> None:
    """Answer requests, one JSON object a line, until the input ends."""
    import logging
    import resource

    import math_verify  # noqa: F401
    import sympy

    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(3000)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    replies, sys.stdout = sys.stdout, sys.stderr
    print("ready", file=replies, flush=True)
    for number, line in enumerate(sys.stdin, start=1):
        try:
            found = verdict(*json.loads(line))
        except Exception:  # a parser's or an algebra's, which have no common base: nothing could be decided
            found = None
        print(json.dumps(found), file=replies, flush=True)
        if number % CLEAR_EVERY == 0:
            _parse.cache_clear()
            sympy.core.cache.clear_cache()


if __name__ == "__main__":
    main()
