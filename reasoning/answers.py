"""Whether an answer is right: extraction from a completion, and comparison by math-verify and SymPy.

`verdict` may compute for ever on a hostile answer, so it runs in the processes of `verifier.py` (this module is their
program) and nowhere else. What can be told without algebra, `answer_of` and `plain_verdict`, is linear in the text.
"""

from __future__ import annotations

import json
import re
import sys
import unicodedata
from collections.abc import Callable
from decimal import Decimal
from functools import lru_cache
from typing import Any

MOST_CHARACTERS = 1000  # of an answer; a longer one is none
MOST_BYTES = 2 << 30  # of address space that one process may use
CLEAR_EVERY = 100  # requests between two clearings of SymPy's caches
CLOSE = 1e-5  # relative distance of numbers that are equal but for rounding

_NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
_IS_NUMBER = re.compile(rf"(?=[-+]?\.?\d)[-+]?{_NUMBER}")
_CUE = re.compile(
    r"(?i)####|(?<!/)\b(?:answer|(?:correct|right|best|final)\s+(?:option|choice))(?:\s+(?:option|choice))?[ \t]*"
    r"(?:is\b|(?:would|should|must)\s+be\b|[:=>]|\*\*|(?=\([A-J]\)))"
)
_CUED = re.compile(r"[\s:*]*((?:(?:\$\$|\\\[)\s*)?[^\n]+?)(?=\n|</answer>|$)")
_CORRECTED = re.compile(r"(?i)\b(?:wait|actually|correction|sorry)\b")
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_DELIMITER, _CLOSES = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])"), {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_ONE_BOXED = re.compile(r"\\boxed\s+(-?\w+)")  # as some solutions of MATH have it
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!; ](?=\d{3}(?!\d))")  # 10\,000
_FUNCTIONS = "arcsin|arccos|arctan|sinh?|cosh?|tanh?|cot|csc|log|ln|infty|pi"
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
_IN_MATHS = (  # letters that are no words: commands, functions, products of variables as 3xyz
    r"\\(?:begin|end)\s*\{[a-z]+\*?\}(?:\{[lcr|]+\})?|\\[a-z]+|(?<=[\^_]\{)[a-z]+|(?<![a-z])(?:max|min|sec|gcd|lcm)(?=\()"
    rf"|(?<![a-z])(?:{_FUNCTIONS}|exp|sqrt|percent|degrees|cup|cap|and|{'|'.join(_POWERS)})(?![a-z])"
    r"|(?:(?<=[\d}{+*^_(=])|(?<=[+*^]\s))[a-dnp-rv-z]{2,}(?![a-z])|(?<![a-z\\])[a-dnp-rv-z]{2,}(?=\s?[+*^]|[\d_({=])"
)
_WORD = re.compile(rf"(?i)(?=[\\\w])({_IN_MATHS})|([^\W\d_]{{2,}})(?:\^\{{?-?\d\}}?)?")
_SHORT_WORDS = {"is", "it", "so", "we", "he"}
_BREAK = re.compile(  # in a sentence: an article, a unit of one letter, the end of a sentence
    r"\b[aAI]\s+(?=\d|[a-z]{2})|['’][a-z]{1,2}\b|[.;:?!](?=\s|$)|\*\*(?=\s|$)|(?<!\S)\*\*"
    r"|(?<=\d)\s?[mgshlL](?:/[smh])?(?:\^\{?\d\}?)?(?![\w(+*/=^])"
)
_LEFT_EDGE, _RIGHT_EDGE = " \t,;:=$*\"'`>|", " \t,;:=$*\"'`<|.!?+-–—/\\"
_UNITS = re.compile(r"(?!.*\b(?:or|not|to|more|less)\b)[^\W\d_]+(?:\.?[\s/]+[^\W\d_]+){0,2}(?:\^\{?-?\d\}?)?")
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?"
    r"(?:\(([A-J])\)|([A-J])(?=[).,:;]|\s*$|\\\s|\s+\(|\s+(?:because|since|as|is)\b))"
    r"(?!\s*(?:(?:[,/&]|or\b|and\b)\s*\(?[A-J]\b|\([A-J]\)))"  # who names several has chosen none
)
_RIGHT_CHOICE = re.compile(r"\(?\b[A-J]\)?(?=\s+(?:is|must be)\s+(?:the\s+)?(?:correct|right|best)\b)")
_UNIT = re.compile(
    r"(?<=[\w)}\]])(?:\\[,;:! ]|[\s~])*\\(?:text|textrm|mbox|mathrm)\s*\{"
    r"(?!\s*(?:percent|hundred|thousand|million|billion)\b)[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$"
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
Choose = Callable[[str], str | None]


def answer_of(completion: str, gold: str = "") -> str | None:
    """The final answer in a completion, or None. Where the reference is a choice, as B, its letter of "(B) 12 cm".

    The latest of `\\boxed{}`, `####` and "answer is" counts; the latest box not being closed, the completion was cut
    off. Else the last bold text, if it is an answer and none follows; else the whole text, if it is an expression, else
    its last `$...$`, `\\(...\\)` or `\\[...\\]`, else the last expression between its words.
    """
    completion = completion[-20 * MOST_CHARACTERS :]
    found = _marked_answer(completion, gold)
    if found is None and (bold := list(_BOLD.finditer(completion))) and not _expressions(completion[bold[-1].end() :]):
        found = _answer_in(bold[-1][1], gold, quantity)
    if found is None:
        found = _answer_in(completion, gold, _last_expression)
    if found and _unit(gold) and (units := re.findall(rf"{re.escape(found)}\s*([^\W\d_]{{2,}})", completion)):
        found += f" {units[-1]}"
    return found if found and len(found) <= MOST_CHARACTERS else None


def quantity(text: str) -> str | None:
    """The number of a text that is one number or expression and its unit, as "5 meters"; None if it is not."""
    found = _expressions(text)
    if len(found) != 1:
        return None
    before, _, after = _TEXT.sub(r" \1 ", text).partition(found[0])
    after = _trimmed(after)
    return found[0] if not _trimmed(before) and (not after or _UNITS.fullmatch(after)) else None


def boxed(text: str) -> str | None:
    """What is in the last `\\boxed{}` or `\\fbox{}` that is closed and not empty, or follows `\\boxed ` as one sign."""
    found = [inside for _, _, inside in _boxes(text) if inside] or _ONE_BOXED.findall(text)
    return found[-1].strip() if found else None


def is_answer(gold: str) -> bool:
    """Whether a reference answer is mathematics, a number and its unit, a word or a choice, and not prose."""
    if gold.strip().lower() in _NOTHING or len(gold) > MOST_CHARACTERS:
        return False
    return not _is_prose(gold) or _word(gold) is not None or quantity(gold) is not None


def value_of(answer: str) -> str:
    """An answer without the words for its unit."""
    return (quantity(answer) if _is_prose(answer) else None) or answer


def plain_verdict(prediction: str, gold: str) -> bool | None:
    """The verdict on two plain numbers, on a text or a choice, or on equal texts; None where it takes algebra."""
    word = _word(gold)
    if word is not None:
        return _bare(prediction).casefold() == word.casefold()
    if len({unit.lower()[:3] for text in (prediction, gold) if (unit := _unit(text))}) > 1:
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


def _marked_answer(text: str, gold: str) -> str | None:
    """The answer that is marked as one; None where none is, and empty where it was cut off."""
    boxes = _boxes(text)
    marks = list[tuple[int, str | None, Choose]]()
    for start, _, inside in boxes:
        marks.append((start, inside and _CUE.split(inside)[-1], lambda text: quantity(text) or text))
    cues = [cue for cue in _CUE.finditer(text) if not any(start < cue.start() < end for start, end, _ in boxes)]
    for cue, end in zip(cues, [*(cue.start() for cue in cues[1:]), len(text)], strict=False):
        if said := _CUED.match(text, cue.end(), end):
            marks.append((cue.start(), said[1], _leading_expression if cue[0] == "####" else _first_expression))
    if _is_choice(gold):
        marks += [(choice.start(), choice[0], str) for choice in _RIGHT_CHOICE.finditer(text)]
    marks.sort(key=lambda mark: mark[0], reverse=True)
    for _, found, choose in marks:
        if found is None:
            return ""
        if answer := _answer_in(found, gold, choose):
            return answer
    return marks[0][1] if marks else None


def _answer_in(text: str, gold: str, choose: Choose) -> str | None:
    """The answer in a part of a completion, which `choose` finds in prose."""
    if _is_choice(gold) and (choice := _CHOICE.match(_bare_start(text))):
        return choice[1] or choice[2]
    text = text.strip().rstrip(".").strip("*` \n")
    if _word(gold) is not None:
        return re.split(r"(?i)\b(?:is|are|was|were)\b", text)[-1].strip() or None
    return choose(text) if _is_prose(text) else text or None


def _last_expression(text: str) -> str | None:
    found = _maths(text) or _expressions(text)
    return found[-1] if found else None


def _leading_expression(text: str) -> str | None:
    found = _expressions(text)
    return found[0] if found and not _trimmed(text.partition(found[0])[0]) else None


def _first_expression(text: str) -> str | None:
    """That of what follows "answer is": its first, unless it begins otherwise or is calculated there."""
    text = ([part for part in _CORRECTED.split(text) if _expressions(part)] or [text])[-1]
    if maths := _maths(text):
        return maths[0]
    if not (found := _expressions(text)):
        return None
    before, _, after = text.partition(found[0])
    words = re.findall(r"[^\W\d_]{2,}", before)
    return found[0] if "=" not in after and len(words) < 2 and words != ["not"] else found[-1]


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    """Start, end and inside of the last `\\boxed{}` and `\\fbox{}` that are not empty; None: it is not closed."""
    found = list[tuple[int, int, str | None]]()
    for sign in list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))[-20:]:
        depth, place = 1, sign.end()
        for place in range(sign.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                break
        inside = text[sign.end() : place] if depth == 0 else None
        if inside is None or inside.strip():
            found.append((sign.start(), place, inside))
    return found


def _maths(text: str) -> list[str]:
    """What is between `$` or `$$`, `\\(` and `\\)`, `\\[` and `\\]`; a single `$` reaches to the end of its line."""
    found, opened = list[str](), None
    for sign in _DELIMITER.finditer(text):
        inside = text[opened.end() : sign.start()] if opened and sign[0] == _CLOSES[opened[0]] else ""
        is_money = sign[0] == "$" and ("\n" in inside or _is_prose(inside))  # two sums of it, and not maths
        if opened and inside.strip() and not is_money:
            found.append(inside.strip().rstrip(".,"))
            opened = None
        elif sign[0] in _CLOSES:
            opened = sign
    return found


def _expressions(text: str) -> list[str]:
    """What is between the words of a sentence and holds a number or a command."""
    parts = _WORD.sub(lambda word: word[1] or "\n", _BREAK.sub("\n", _TEXT.sub(r" \1 ", text))).splitlines()
    found = [_trimmed(part.lstrip(" )").rstrip(" (")) for part in parts]
    found = [part if part.count("(") == part.count(")") else _trimmed(part.strip("()")) for part in found]
    found = [re.sub(r"^[^A-Za-z\\]*=\s*", "", part) for part in found]  # 7 of 3 + 4 = 7
    return [part for part in found if re.search(r"\d|\\[A-Za-z]|[∞√π½-¾]", part)]


def _trimmed(part: str) -> str:
    """Without the punctuation and the "and" around it, and a dash before it."""
    part = part.strip(_LEFT_EDGE).rstrip(_RIGHT_EDGE).removeprefix("and").removesuffix("and")
    return re.sub(r"^[-–—+]\s+", "", part.lstrip(_LEFT_EDGE)).rstrip(_RIGHT_EDGE)


def _is_prose(text: str) -> bool:
    words = (word[2].lower() for word in _WORD.finditer(_TEXT.sub(" ", text)) if word[2])
    return any(len(word) > 2 or word in _SHORT_WORDS for word in words)


def _bare(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip(" $().!*\n")


def _bare_start(text: str) -> str:
    return _TEXT.sub(r"\1", text).replace("$", "").replace("*", "").strip()


def _is_choice(gold: str) -> bool:
    return re.fullmatch(r"[A-J]", _bare(gold)) is not None


def _word(gold: str) -> str | None:
    """A text, a single word or a choice (A to J) that stands for itself; None for mathematics."""
    bare = _bare(gold)
    is_text = _TEXT.fullmatch(gold.strip(" $")) and re.search(r"[^\W\d_]{3,}", bare)
    is_word = re.fullmatch(r"[^\W\d_]{3,}", bare) and _is_prose(bare) or bare.lower() == "no"
    return bare if is_text or is_word or _is_choice(gold) else None


def _unit(answer: str) -> str | None:
    """The first word of the unit, as in "5 meters"."""
    words = re.findall(r"[^\W\d_]{2,}", answer.removeprefix(value_of(answer)))
    return words[0] if words else None


def _plain(text: str) -> str:
    text = re.sub(r"\\?\$|[€£]", "", _TEXT.sub(r"\1", text)).translate(_SIGNS)
    text = re.sub(r"(?<![\w)])–(?=[\d.])", "-", text)
    text = re.sub(r"[⁰¹²³⁴-⁹]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅓-⅞])", " ", text)
    text = re.sub(r"[¼-¾⅓-⅞]", lambda found: unicodedata.normalize("NFKC", found[0]).replace("⁄", "/"), text)
    text = _DELIMITER.sub("", _THIN_SPACE.sub("", text)).strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def _squeezed(text: str) -> str:
    text = re.sub(r"\s+|\\left|\\right|\\[,;:! ]", "", _plain(text))
    return re.sub(r"\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))", r"(\1\2/\3\4)", text)


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    from math_verify import parse

    text = re.sub(rf"(?<![\\A-Za-z])({_FUNCTIONS})(?![A-Za-z])", r"\\\1", _plain(text))
    text = re.sub(r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(rf"(?<=\d)\s*({'|'.join(_POWERS)})\b", lambda found: rf" \times 10^{_POWERS[found[1]]}", text)
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
    smaller = min(abs(sympy.N(side)) for side in (ours, theirs))
    return bool(abs(sympy.N(ours - theirs)) > CLOSE * smaller) and not ours.equals(theirs)


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
