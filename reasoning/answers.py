"""Whether an answer is right: extraction from a completion, and comparison by math-verify and SymPy.

`verdict` may compute for ever on a hostile answer, so it runs in the processes of `verifier.py` (this module is their
program) and nowhere else. What can be told without algebra, `answer_of` and `plain_verdict`, is linear in the text.
"""

from __future__ import annotations

import json
import re
import sys
from decimal import Decimal
from functools import lru_cache
from typing import Any

MOST_CHARACTERS = 1000  # of an answer; a longer one is none
MOST_BYTES = 2 << 30  # of address space that one process may use
CLEAR_EVERY = 100  # requests between two clearings of SymPy's caches

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
_IS_NUMBER = re.compile(rf"(?=[-+]?\.?\d){_NUMBER}")
_FRACTION = r"-?\\[dt]?frac\s*\{[^{}]*\}\s*\{[^{}]*\}"
_LAST_NUMBER = re.compile(rf"{_FRACTION}|(?<![\w.])(?=[-+]?\.?\d){_NUMBER}(?:/\d+|\s?\\?%)?")
_CUES = (
    re.compile(r"####[ \t]*([^\n]+)"),
    re.compile(r"(?i)\banswer[ \t]*(?:is\b|[:=]|\*\*)[\s:*]*((?:(?:\$\$|\\\[)\s*)?[^\n]+)"),
)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
_DELIMITER, _CLOSES = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])"), {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_ENVIRONMENT = re.compile(r"\\(?:begin|end)\s*\{[a-z]+\*?\}")
_ONE_BOXED = re.compile(r"\\boxed\s+(-?\w+)")  # as some solutions of MATH have it
_COMMAND, _TEXT = re.compile(r"\\[A-Za-z]+"), re.compile(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!; ](?=\d{3}(?!\d))")  # 10\,000
_WORDS = re.compile(r"[^\W\d_]{3,}")
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?(?:\(([A-J])\)|([A-J])(?=[).,:;]|\s*$|\\\s|\s+(?:because|since|as)\b))"
    r"(?!\s*(?:(?:[,/&]|or\b|and\b)\s*\(?[A-J]\b|\([A-J]\)))"  # who names several has chosen none
)
_UNIT = re.compile(
    r"(?<=[\w)}\]])(?:\\[,;:! ]|[\s~])*\\(?:text|mbox|mathrm)\s*\{"
    r"(?!\s*(?:percent|hundred|thousand|million|billion)\b)[^{}]*[A-Za-z][^{}]*\}(?:\s*\^\s*\{?\d\}?)?\s*$"
)
_IN_BASE = re.compile(r"([-+]?[0-9A-Z]+)_\{?(\d+)\}?")
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d+)\s+(\d+)/(\d+)(?![\w.,/^])")
_POWER_OF_TEN = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_FUNCTIONS = {"sqrt", "sin", "cos", "tan", "log", "exp", "percent", "degrees", "cup", "cap", "infty", "and"}
_SHORT_WORDS = re.compile(r"(?i)(?<![^\W\d_])(?:is|it|so|we|he)(?![^\W\d_])")
_NOTHING = {"", "?", "-", "n/a", "nan", "none", "null", "dne"}


def answer_of(completion: str, gold: str = "") -> str | None:
    """The final answer in a completion, or None. Where the reference is a choice, as B, its letter of "(B) 12 cm".

    The last `\\boxed{}` counts, else what follows the last `####` or "answer is", else the last bold text, else the
    whole text if it is an expression, else the last `$...$`, `\\(...\\)` or `\\[...\\]`, else the last number. Of a
    sentence, the first expression between such signs counts, else the last number.
    """
    completion = completion[-20 * MOST_CHARACTERS :]
    found = _last_boxed(completion)
    for cue in _CUES:
        found = found or _last(cue, completion)
    found = found or _last(_BOLD, completion)
    if re.fullmatch(r"[A-J]", _bare(gold)) and (choice := _CHOICE.match(_bare_start(found or completion))):
        return choice[1] or choice[2]
    if not found and completion.strip() and not _is_prose(completion):
        found = completion
    if not found and (candidates := _maths(completion) or _numbers(completion)):
        found = candidates[-1]
    found = found.strip().rstrip(".").strip("*` \n") if found else ""
    if _is_prose(found):
        found = (_maths(found)[:1] or _numbers(found) or [found])[-1].strip()
    return found if 0 < len(found) <= MOST_CHARACTERS else None


def boxed(text: str) -> str | None:
    """What is in the last `\\boxed{}` or `\\fbox{}` that is closed and not empty, or follows `\\boxed ` as one sign."""
    if (found := _last_boxed(text)) is None:
        found = _last(_ONE_BOXED, text)
    return found.strip() if found is not None else None


def is_answer(gold: str) -> bool:
    """Whether a reference answer is mathematics, a word in `\\text{}` or a choice, and not prose."""
    return gold.strip().lower() not in _NOTHING and len(gold) <= MOST_CHARACTERS and not _is_prose(gold)


def plain_verdict(prediction: str, gold: str) -> bool | None:
    """The verdict on two plain numbers, or on a text or a choice; None where it takes algebra."""
    word = _word(gold)
    if word is not None:
        return _bare(prediction).casefold() == word.casefold()
    numbers = [_plain(text) for text in (prediction, gold)]
    if all(in_base := [_IN_BASE.fullmatch(number) for number in numbers]):
        return len({(found[1].lstrip("+"), found[2]) for found in in_base if found}) == 1
    if not all(len(number) < 30 and _IS_NUMBER.fullmatch(number) for number in numbers):
        return None
    ours, theirs = (Decimal(number.replace(",", "")) for number in numbers)
    return ours == theirs


def verdict(prediction: str, gold: str) -> bool | None:
    """Whether two answers are equal; None if the reference cannot be parsed. The order makes no difference."""
    texts = [re.sub(r"(?<!\\)\$", "", text) for text in (prediction, gold)]
    if sum(bool(_UNIT.search(text)) for text in texts) == 1:
        texts = [_UNIT.sub("", text) for text in texts]
    ours, theirs = (_parse(text) for text in texts)
    if theirs is None or ours is None:
        return None if theirs is None else False
    return _equal(theirs, ours) or (not _is_ordered(theirs, ours) and _equal(ours, theirs))


def _last_boxed(text: str) -> str | None:
    """What is in the last `\\boxed{}` or `\\fbox{}` that is closed and not empty."""
    for start in reversed([match.end() for match in re.finditer(r"\\(?:boxed|fbox)\s*\{", text)][-20:]):
        depth = 1
        for place in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                if text[start:place].strip():
                    return text[start:place]
                break
    return None


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    found = pattern.findall(text)
    return found[-1] if found else None


def _maths(text: str) -> list[str]:
    """What is between `$` or `$$`, `\\(` and `\\)`, `\\[` and `\\]`; a single `$` reaches to the end of its line."""
    found, opened = list[str](), None
    for sign in _DELIMITER.finditer(text):
        inside = text[opened.end() : sign.start()] if opened and sign[0] == _CLOSES[opened[0]] else ""
        is_money = sign[0] == "$" and ("\n" in inside or _is_prose(inside))  # two sums of it, and not maths
        if opened and inside.strip() and not is_money:
            found.append(inside)
            opened = None
        elif sign[0] in _CLOSES:
            opened = sign
    return found


def _numbers(text: str) -> list[str]:
    return [match[0] for match in _LAST_NUMBER.finditer(text)]


def _is_prose(text: str) -> bool:
    text = _COMMAND.sub(" ", _ENVIRONMENT.sub(" ", _TEXT.sub(" ", text)))
    return bool(_SHORT_WORDS.search(text)) or any(word.lower() not in _FUNCTIONS for word in _WORDS.findall(text))


def _bare(text: str) -> str:
    return _TEXT.sub(r"\1", text).strip(" $().\n")


def _bare_start(text: str) -> str:
    return _TEXT.sub(r"\1", text).replace("$", "").replace("*", "").strip()


def _word(gold: str) -> str | None:
    """A text or a choice (A to J) that stands for itself; None for mathematics."""
    bare = _bare(gold)
    is_text = _TEXT.fullmatch(gold.strip(" $")) and _WORDS.search(bare)
    return bare if is_text or re.fullmatch(r"[A-J]", bare) else None


def _plain(text: str) -> str:
    text = _TEXT.sub(r"\1", text).replace("\\$", "").replace("$", "")
    text = _DELIMITER.sub("", _THIN_SPACE.sub("", text)).strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


@lru_cache(maxsize=256)
def _parse(text: str) -> Any:
    from math_verify import parse

    text = _plain(text)
    text = re.sub(r"(?<![\\A-Za-z])(pi|sin|cos|tan|log|ln|infty)(?![A-Za-z])", r"\\\1", text)
    text = re.sub(r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = _MIXED.sub(r"(\1+\2/\3)", _POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text))
    text = re.sub(r"√\s*(\d+|[a-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    text, percents = re.subn(r"\s*(?:\\?%|percent)\s*$", "", text)
    found = parse(f"${text}$", parsing_timeout=None, fallback_mode="no_fallback")
    if not found:
        return None
    return found[0] / 100 if percents else found[0]


def _is_ordered(gold: Any, prediction: Any) -> bool:
    """Whether the reference is a tuple, as (1, 2), and the prediction its numbers in some order, as 2, 1."""
    import sympy

    return isinstance(gold, sympy.Tuple | sympy.Interval) and isinstance(prediction, sympy.FiniteSet)


def _equal(gold: Any, prediction: Any) -> bool:
    from math_verify import verify

    return verify(gold, prediction, timeout_seconds=None) or _equal_for_positive(gold, prediction)


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
