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
    answer_of,
    bare,
    expressions,
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
ROUNDED = 0.01  # relative distance of a number from what it is said to be about
CLOSE = 1e-5  # relative distance of numbers that are equal but for rounding
_FRACTION = re.compile(rf"\(?([-+]?(?=\.?\d){NUMBER}(?:[eE][-+]?\d{{1,2}})?)(?:/(\d+))?\)?")
_HAS_LETTERS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")
_NAMED = re.compile(r"^\s*[A-Za-z]\s*=")
_UNIT = re.compile(
    r"(?<=[\w)}\]])(?:\\[,;:! ]|[\s~])*\\(?:text|textrm|mbox|mathrm)\s*\{"
    r"(?!\s*(?:percent|hundred|thousand|million|billion)\b)[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$"
)
_OPEN = re.compile(  # a relation, or a sum or a list, of which a side or an end is not said
    r"^[\s$]*(?:[<>≤≥≠]|\\(?:leq?|geq?|neq?|lt|gt)(?![a-z]))|[-+*/=][\s$?]*$|\\[lcv]?dots|…|\.\.\."
)
_PLUS_OR_MINUS = re.compile(r"\\(pm|mp)(?![a-z])")
_IN_BASE = re.compile(r"([-+]?[0-9A-Z]+)_\{?(\d+)\}?")
_EQUALS = re.compile(r"(?<![\\<>!:])=(?![^{}()]*[})])")  # not in P(X = 2)
_NAME = re.compile(r"\s*(?:[A-Za-z]|\\[A-Za-z])[^|&<>]*")  # P(X = 2), \det A
_CLOSE_TO = re.compile(r"\\approx(?![a-z])")
_ARTICLE = re.compile(r"(?i)^(?:an?|the)\s+(?=\w{2})")
_SEVERAL = re.compile(r"[,;]|(?<![\\A-Za-z])(?:or|and)(?![A-Za-z])")
_MODULUS = re.compile(r"(?:\\[ ,;]|\s)*(?:\\pmod\s*(?:\{([^{}]*)\}|(\w))|\(\s*\\?(?:bmod|mod)\s*([^()]*)\))\s*$")
_BRACES = re.compile(r"\\[{}]")
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
        return _ARTICLE.sub("", bare(prediction)).casefold() == word.casefold()
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


def only_repeats(problem: str, completion: str, gold: str) -> bool:
    """Whether a completion answers with an expression of the problem, as 3 + 4 where the sum is asked for.

    It equals the reference wherever a problem asks to calculate, expand, factor or simplify.
    """
    given = answer_of(completion, gold)
    if given is None or word_of(gold) is not None:
        return False
    value, _ = measured(given) or (given, "")
    if IS_NUMBER.fullmatch(plain(value.rstrip("\\% "))):
        return False
    if _unbracketed(given) == _unbracketed(gold):  # it was to be chosen
        return False
    ours = squeezed(given)
    parts = (side for part in expressions(problem) for side in (part, *_EQUALS.split(part)))
    return any(squeezed(part) == ours for part in parts)


def _unbracketed(text: str) -> str:
    """What expressions have in common that differ in spelling alone, as 1/2 and \\frac{1}{2}."""
    return re.sub(r"[(){}\[\]$]", "", squeezed(latex(text)))


def normal_form(answer: str) -> str:
    """A text that answers have in common that are written almost alike, as "x = 5.0" and "5"."""
    text = re.sub(r"^[A-Za-z]=", "", squeezed(value_of(answer)))
    if fraction := _FRACTION.fullmatch(text):
        above, below = (Fraction(part.replace(",", "")) for part in (fraction[1], fraction[2] or "1"))
        return str(above / below) if below else text
    return text


def verdict(prediction: str, gold: str) -> bool | None:
    """Whether two answers are equal; None if the reference cannot be parsed. The order makes no difference."""
    import sympy

    texts = [re.sub(r"(?<!\\)\$", "", text) for text in (prediction, gold)]
    moduli = {next(filter(None, found.groups()), "") for text in texts if (found := _MODULUS.search(plain(text)))}
    if len(moduli) > 1:
        return False
    texts = [_MODULUS.sub("", plain(text)) for text in texts] if moduli else texts
    if sum(bool(_UNIT.search(text)) for text in texts) == 1:
        texts = [_UNIT.sub("", text) for text in texts]
    ours, theirs = (_parse(text) for text in texts)
    if theirs is None or ours is None:
        return None if theirs is None else False
    if _are_of_two_kinds(texts[0], theirs) or _are_of_two_kinds(texts[1], ours):
        return False
    if not any(isinstance(side, sympy.Tuple | sympy.Interval) for side in (ours, theirs)):
        ours, theirs = (_with_repeats(side, text) for side, text in zip((ours, theirs), texts, strict=True))
    if _is_ordered(ours, theirs):
        ours, theirs = theirs, ours
    return _equal(theirs, ours) or (not _is_ordered(theirs, ours) and _equal(ours, theirs))


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    import sympy

    text = latex(text)
    if len(parts := text.split(":")) > 2:  # 1:2:3 is a ratio, and no division
        values = [_parse_latex(part) for part in parts]
        unit = next((value for value in values if value != 0), None)
        return sympy.Tuple(*(value / unit for value in values)) if all(map(_is_number, values)) and unit else None
    if not _SEVERAL.search(text) and len(parts := _EQUALS.split(text)) + text.count(r"\approx") > 1:
        if _is_contradiction(text) or any(_parse_latex(part) is None for part in parts[1:-1]):
            return None
        is_named = _NAME.fullmatch(parts[0]) and _parse_latex(parts[0]) is None
        text = parts[-1] if is_named else f"{parts[0]}={parts[-1]}" if len(parts) > 2 else text
    found = _parse_latex(text)
    if found is None and _PLUS_OR_MINUS.search(text):
        text = re.sub(r"^\s*[A-Za-z]\s*=", "", text)
        found = _parse_latex(", ".join(_signed(text, upper) for upper in (True, False)))
    if isinstance(found, sympy.Equality) and found.lhs.is_number and found.rhs.is_Symbol:
        return sympy.Eq(found.rhs, found.lhs, evaluate=False)
    if isinstance(found, sympy.FiniteSet) and all(isinstance(part, sympy.Equality) for part in found):
        return type(found)(
            *sorted(getattr(found, "_unsorted_args", found.args), key=lambda part: str(part.lhs))
        )  # y = 2, x = 1 is (1, 2)
    for word, combined in (("or", sympy.Union), ("and", sympy.Intersection)):
        if len(parts := re.split(rf"(?<![\\a-z]){word}(?![a-z])", text)) > 1:
            bounds = [_parse_latex(part) for part in parts]
            if all(map(_is_inequality, bounds)) and len(set.union(*(bound.free_symbols for bound in bounds))) == 1:
                return combined(*(bound.as_set() for bound in bounds))
    return found


def _parse_latex(text: str) -> Any:
    from math_verify import LatexExtractionConfig, parse

    found = parse(f"${text}$", [LatexExtractionConfig()], parsing_timeout=None, fallback_mode="no_fallback")
    return found[0] if found and _is_read_whole(text) else None


def _is_read_whole(text: str) -> bool:
    """Whether the parser reads a text to its end; else it would take 7 for "7 | 4"."""
    from antlr4 import CommonTokenStream, InputStream, Token
    from latex2sympy2_extended.antlr_parser import PSLexer, PSParser
    from latex2sympy2_extended.math_normalization import normalize_latex
    from math_verify import LatexExtractionConfig

    lexer = PSLexer(InputStream(normalize_latex(text, LatexExtractionConfig().normalization_config)))
    tokens = CommonTokenStream(lexer)
    parser = PSParser(tokens)
    for part in (lexer, parser):
        part.removeErrorListeners()
    parser.math()
    return bool(tokens.LA(1) == Token.EOF)


def _is_contradiction(text: str) -> bool:
    """Whether it equates numbers that are not equal, or says nothing, as 5 = 5."""
    sides = _EQUALS.split(text)
    if len(sides) > 1 and len({squeezed(side) for side in sides}) == 1:
        return True
    equal = [value for side in sides if _is_number(value := _parse_latex(_CLOSE_TO.split(side)[0]))]
    close = [value for side in _CLOSE_TO.split(text) if _is_number(value := _parse_latex(_EQUALS.split(side)[-1]))]
    return any(not _equal(one, equal[0]) for one in equal[1:]) or any(not _is_about(one, close[0]) for one in close[1:])


def _is_about(one: Any, other: Any) -> bool:
    import sympy

    return bool(abs(sympy.N(one - other)) <= ROUNDED * abs(sympy.N(other)))


def _is_number(side: Any) -> bool:
    import sympy

    return isinstance(side, sympy.Expr) and bool(side.is_number)


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


def _are_of_two_kinds(text: str, other: Any) -> bool:
    """Whether the one is a set in braces, and the other a tuple or an interval."""
    import sympy

    ends = squeezed(text)
    is_set = ends.startswith(r"\{") and ends.endswith(r"\}")
    return is_set and isinstance(other, sympy.Tuple | sympy.Interval)


def _with_repeats(side: Any, text: str) -> Any:
    """A list in which a number comes twice, which is not the list where it comes once; in braces it is a set."""
    import sympy

    if not isinstance(side, sympy.FiniteSet) or _BRACES.search(text):
        return side
    members: Any = getattr(side, "_unsorted_args", side.args)
    if len(members) == len(side.args):
        return side
    if re.search(r"(?<![\\A-Za-z])or(?![A-Za-z])", text) and all(_equal(members[0], other) for other in members[1:]):
        return members[0]  # 1/2 or 50%
    return sympy.Tuple(*sympy.ordered(members))


def _is_to_be_solved(side: Any) -> bool:
    """Whether it is an equation of one variable that is not solved for it, as 2x = 10."""
    import sympy

    if not isinstance(side, sympy.Equality) or not _is_of_numbers(side):
        return False
    names = side.free_symbols
    return len(names) == 1 and not side.lhs.is_Symbol and bool(side.lhs.is_rational_function(*names))


def _equal(gold: Any, prediction: Any) -> bool:
    import sympy
    from math_verify import verify

    equations = [isinstance(side, sympy.Equality) for side in (gold, prediction)]
    if sum(equations) == 1 and any(map(_is_to_be_solved, (gold, prediction))):
        return False
    is_equal = verify(gold, prediction, timeout_seconds=None) and not _are_apart(gold, prediction)
    others = (_equal_decimals, _equal_for_positive, _equal_relations)
    return is_equal or any(equal(gold, prediction) for equal in others)


def _equal_decimals(gold: Any, prediction: Any) -> bool:
    """Whether two decimals are the same number, as 60.2e22 and 6.02e23, which floating point tells apart."""
    import sympy

    if not all(_is_number(side) and side.is_rational is not False for side in (gold, prediction)):
        return False
    ours, theirs = (sympy.nsimplify(side.doit(), rational=True) for side in (gold, prediction))
    return bool(ours.is_Rational and ours == theirs)


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
