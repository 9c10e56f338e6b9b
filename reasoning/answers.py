"""Whether an answer is right: by its text where that is enough, else by math-verify and SymPy.

`verdict` may compute for ever on a hostile answer, so it runs in the processes of `verifier.py` (this module is their
program) and nowhere else. What can be told without algebra, `plain_verdict`, is linear in the text.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from reasoning.extraction import (
    MOST_CHARACTERS,
    TEXT,
    bare,
    is_prose,
    quantity,
    unit_of,
    value_of,
    word_of,
)
from reasoning.notation import IS_NUMBER, NUMBER, latex, plain, squeezed
from reasoning.units import measured

MOST_BYTES = 2 << 30  # of address space that one process may use
CLEAR_EVERY = 100  # requests between two clearings of SymPy's caches
CLOSE = 1e-5  # relative distance of numbers that are equal but for rounding
_FRACTION = re.compile(rf"\(?([-+]?(?=\.?\d){NUMBER}(?:[eE][-+]?\d{{1,2}})?)(?:/(\d+))?\)?")
_HAS_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_NAMED = re.compile(r"^\s*[A-Za-z]\s*=")
_UNIT = re.compile(
    r"(?<=[\w)}\]])(?:\\[,;:! ]|[\s~])*\\(?:text|textrm|mbox|mathrm)\s*\{"
    r"(?!\s*(?:percent|hundred|thousand|million|billion)\b)[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$"
)
_OPEN = re.compile(  # a relation, or a sum or a list, of which a side or an end is not said
    r"^[\s$]*(?:[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))|[-+*/=][\s$]*$|\\[lcv]?dots|…|\.\.\."
)
_PLUS_OR_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
_IN_BASE = re.compile(r"([-+]?[0-9A-Z]+)_\{?(\d+)\}?")
_NOTHING = {"", "?", "-", "n/a", "nan", "none", "null", "dne"}


def is_answer(gold: str) -> bool:
    """Whether a reference answer is mathematics, a number and its unit, a word or a choice, and not prose."""
    if gold.strip().lower() in _NOTHING or len(gold) > MOST_CHARACTERS or not re.search(r"[^\W_]|\\|[∞∅]", gold):
        return False
    return not is_prose(gold) or word_of(gold) is not None or quantity(gold) is not None


def plain_verdict(prediction: str, gold: str) -> bool | None:
    """The verdict on two plain numbers, on a text or a choice, or on equal texts; None where it takes algebra."""
    word = word_of(gold)
    if word is not None:
        return bare(prediction).casefold() == word.casefold()
    values = without_units(prediction, gold)
    if values is None:
        return False
    if sum(bool(_OPEN.search(text)) for text in (prediction, gold)) == 1:
        return False
    numbers = [plain(text) for text in values]
    if all(in_base := [_IN_BASE.fullmatch(number) for number in numbers]):
        return len({(found[1].lstrip("+"), found[2]) for found in in_base if found}) == 1
    if not all(IS_NUMBER.fullmatch(number) for number in numbers):
        return True if squeezed(prediction) == squeezed(gold) else None
    ours, theirs = (Decimal(number.replace(",", "")) for number in numbers)
    return ours == theirs


def without_units(prediction: str, gold: str) -> tuple[str, str] | None:
    """Both answers without their units; None if these are two different ones. One that has none may have any."""
    ours, theirs = unit_of(prediction), unit_of(gold)
    if not (ours <= theirs or theirs <= ours) and ours and theirs:
        return None
    spaced = [TEXT.sub(r" \1 ", text) for text in (prediction, gold)]
    found = [measured(text) for text in spaced]
    is_number = [not _HAS_LETTERS.search(_NAMED.sub("", text)) for text in spaced]
    return (
        found[0][0] if found[0] and (found[1] or is_number[1]) else value_of(prediction),
        found[1][0] if found[1] and (found[0] or is_number[0]) else value_of(gold),
    )


def normal_form(answer: str) -> str:
    """A text that answers have in common that are written almost alike, as "x = 5.0" and "5"."""
    text = re.sub(r"^[A-Za-z]=", "", squeezed(value_of(answer)))
    if fraction := _FRACTION.fullmatch(text):
        above, below = (Fraction(part.replace(",", "")) for part in (fraction[1], fraction[2] or "1"))
        return str(above / below) if below else text
    return text


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


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    import sympy

    text = latex(text)
    found = _parse_latex(text)
    if found is None and _PLUS_OR_MINUS.search(text):
        text = re.sub(r"^\s*[A-Za-z]\s*=", "", text)
        found = _parse_latex(", ".join(_signed(text, upper) for upper in (True, False)))
    if isinstance(found, sympy.Equality) and found.lhs.is_number and found.rhs.is_Symbol:
        return sympy.Eq(found.rhs, found.lhs, evaluate=False)
    for word, combined in (("or", sympy.Union), ("and", sympy.Intersection)):
        if len(parts := re.split(rf"(?<![\\a-z]){word}(?![a-z])", text)) > 1:
            bounds = [_parse_latex(part) for part in parts]
            if all(map(_is_inequality, bounds)) and len(set.union(*(bound.free_symbols for bound in bounds))) == 1:
                return combined(*(bound.as_set() for bound in bounds))
    return found


def _parse_latex(text: str) -> Any:
    from math_verify import parse

    found = parse(f"${text}$", parsing_timeout=None, fallback_mode="no_fallback")
    return found[0] if found else None


def _signed(text: str, upper: bool) -> str:
    """With the upper or the lower of the signs that `\\pm` and `\\mp` have."""
    return _PLUS_OR_MINUS.sub(lambda sign: "+" if (sign[1] == "pm") == upper else "-", text)


def _is_inequality(side: Any) -> bool:
    """Whether it is one relation, and no equation, of one variable."""
    import sympy

    is_relation = isinstance(side, sympy.core.relational.Relational) and not isinstance(side, sympy.Equality)
    return is_relation and len(side.free_symbols) == 1


def _is_ordered(gold: Any, prediction: Any) -> bool:
    """Whether the one is a tuple, as (1, 2), and the other numbers in some order, as 2, 1."""
    import sympy

    return isinstance(gold, sympy.Tuple | sympy.Interval) and isinstance(prediction, sympy.FiniteSet)


def _equal(gold: Any, prediction: Any) -> bool:
    from math_verify import verify

    is_equal = verify(gold, prediction, timeout_seconds=None) and not _are_apart(gold, prediction)
    return is_equal or _equal_for_positive(gold, prediction) or _equal_relations(gold, prediction)


def _equal_relations(gold: Any, prediction: Any) -> bool:
    """Whether two equations of several variables are multiples of each other, or the same bounds said in two orders."""
    import sympy

    if all(isinstance(side, sympy.And) for side in (gold, prediction)):
        return {one.canonical for one in gold.args} == {one.canonical for one in prediction.args}
    if not all(isinstance(side, sympy.Equality) and _is_of_numbers(side) for side in (gold, prediction)):
        return False
    ours, theirs = (side.lhs - side.rhs for side in (gold, prediction))
    if ours.free_symbols != theirs.free_symbols or len(ours.free_symbols) < 2:
        return False
    factor = sympy.simplify(ours / theirs)
    return bool(factor.is_number and factor.is_finite and factor != 0)


def _is_of_numbers(equation: Any) -> bool:
    """Whether its sides are expressions, and not sets or tuples."""
    import sympy

    return all(isinstance(side, sympy.Expr) for side in equation.args)


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
