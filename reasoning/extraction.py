"""The final answer in a completion: where it is marked, or what of a sentence it is. Linear in the text.

Whether it is right is decided in `answers`.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from reasoning.units import UNIT, measured, name_of

MOST_CHARACTERS = 1000  # of an answer; a longer one is none
_CUE = re.compile(
    r"(?i)####|(?<!/)\b(?:answer|(?:correct|right|best|final)\s+(?:option|choice))(?:\s+(?:option|choice))?[ \t]*"
    r"(?:is\b|(?:would|should|must)\s+be\b|[:=>]|\*\*|(?=\([A-J]\)))"
)
_CUED = re.compile(r"[\s:*]*((?:(?:\$\$|\\\[)\s*)?[^\n]+?)(?=\n|</answer>|$)")
_CORRECTED = re.compile(  # between punctuation, and not as in "5 minutes to wait"
    r"(?i)(?:(?<=[.!?;,:—–(\n])\s*|\s-\s*)(?:(?:oh|no|hmm|but)[,.!]?\s+)?(?:wait|hold on|actually|correction|sorry)\b"
    r"(?:\s*[,.!:—–-]|\s+(?=it\b|that\b|the\b|no\b))"
)
_ALTERNATIVE = re.compile(r"\s*,?\s*(?:or|times|plus|over|divided|multiplied|to\s+the\s+power)\b")
_DECORATION = re.compile(  # => 5, :5, ✅ 5
    r"^(?:\s|=>|[:=](?!=)|[\u2190-\u21ff∴✀-➿\ufe0f]|\\(?:[Rr]ightarrow|therefore|implies)(?![a-z]))+"
    r"|[\s✀-➿\ufe0f\U0001f300-\U0001faff]{1,20}$"
)
_NEAR = 50  # characters beside an expression that say what it is
_LINK = re.compile(r"[\s$*)\\\]]*(?:,|(,?\s*(?:and|or)))[\s$*(\\\[]*")
_INSTEAD = re.compile(r"(?i)(?:,\s*(?:and\s+)?not|\binstead\s+of|\brather\s+than)[\s$*\\(]*$")
_DENIED = re.compile(
    r"(?i)(?:\bnot|n['’]t(?:\s+be)?|\bcannot(?:\s+be)?|\bnever"
    r"|\b(?:greater|less|more|fewer|larger|smaller|higher|lower)\s+than|\bexceeds?|\bdivisible\s+by"
    r"|\b(?:half|twice|double|triple|root|square|cube|third|quarter|factor|multiple|logarithm)(?:\s+of)?)[\s$*\\(]*$"
)
_REFUTED = re.compile(
    r"(?i)[\s$*\\)]*(?:(?:is|was)(?:\s+not|n['’]t)|(?:is|was)\s+(?:wrong|incorrect|false|impossible)"
    r"|or\s+(?:more|less|fewer|greater|above|below)|squared|cubed|factorial|mod|modulo)\b"
)
_QUESTION = re.compile(r"[^.!\n]*\?")
_CLAUSE = re.compile(r"(?i)[.,;](?=\s|$)|\b(?:because|since|as|where)\b")
_NEGATIVE = re.compile(r"(?i)\b(?:negative|minus)\s+(?=\$?\d)")
_LETTER = re.compile(r"(?<![\w'’])(?:\(([A-J])\)|([A-J])(?=[).:,;]|\s*$))")
_REJECTED = re.compile(
    r"(?i:\b(?:if|whether|not|wrong|incorrect|false|neither|cannot|eliminat\w*)\b)|\b[A-J]\)?\s*(?:or\b|and\b|[/&])\s*\(?[A-J]\b"
)
_CODE = re.compile(  # and calculations as in the solutions of GSM8K: 3 + 4 = <<3+4=7>>7
    r"(?is)<<[^<>\n]*>>"
    r"|```(?:python|py|c|cpp|c\+\+|java|javascript|js|bash|sh|sql|r|julia|matlab)[ \t]*\n.*?(?:```|$)"
)
_OPTIONS = re.compile(  # the choices said again at the end, and none of them chosen
    "|".join(rf"\n[^\w\n]*{a}\b[^\n]*\n[^\w\n]*{b}\b[^\n]*\Z" for a, b in zip("ABCDEFGHI", "BCDEFGHIJ", strict=True))
)
_BOLD = re.compile(r"\*\*([^*\n]+)\*\*")
DELIMITER, _CLOSES = re.compile(r"(?<!\\)(?:\$\$?|\\[()\[\]])"), {"$": "$", "$$": "$$", r"\(": r"\)", r"\[": r"\]"}
_ONE_BOXED = re.compile(r"\\boxed\s+(-?\w+)")  # as some solutions of MATH have it
TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
FUNCTIONS = "arcsin|arccos|arctan|sinh?|cosh?|tanh?|cot|csc|log|ln|infty|pi"
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9}
_IN_MATHS = (  # letters that are no words: commands, functions, products of variables as 3xyz
    r"\\(?:begin|end)\s*\{[a-z]+\*?\}(?:\{[lcr|]+\})?|\\[a-z]+|(?<=[\^_]\{)[a-z]+|(?<![a-z])(?:max|min|sec|gcd|lcm)(?=\()"
    rf"|(?<![a-z])(?:{FUNCTIONS}|exp|sqrt|percent|degrees|(?:(?<=[)\]}}])|(?<=[)\]}}]\s))c[ua]p|and|{'|'.join(POWERS)})(?![a-z])"
    r"|(?:(?<=[\d}{+*^_(=])|(?<=[+*^]\s))[a-dnp-rv-z]{2,}(?![a-z])|(?<![a-z\\])[a-dnp-rv-z]{2,}(?=\s?[+*^]|[\d_({=])"
)
_CJK = "[\u3040-\u30ff\u3400-\u9fff]"  # of Chinese and Japanese, where one sign may be a word
_WORD = re.compile(rf"(?i)(?=[\\\w])({_IN_MATHS})|([^\W\d_]{{2,}}|{_CJK})(?:\^\{{?-?\d\}}?)?")
_SHORT_WORDS = {"is", "it", "so", "we", "he"}
_SAID_AGAIN = re.compile(  # 3/8 (or 0.375), $\frac{3}{8}$ (37.5\%), 3 (three)
    r"(\$[^$]+\$)\s+\([^()]*\)"
    r"|(\S*[\d}])\s+\((?:(?:or|i\.?e\.?|about|approximately|=|≈|\\approx)[\s,\d\\][^()]*|[a-z][a-z -]{2,})\)"
)
_BREAK = re.compile(  # in a sentence: an article, a unit of one letter, the end of a sentence
    r"\b[aAI]\s+(?=\d|[a-z]{2})|['’][a-z]{1,2}\b|[.;:?!](?=\s|$)|\b(?:i\.e|e\.g)\.|\*\*(?=\s|$)|(?<!\S)\*\*"
    r"|(?<=\d)\s?[mgshlL](?:/[smh])?(?:\^\{?\d\}?)?(?![\w(+*/=^])"
)
_LEFT_EDGE, _RIGHT_EDGE = " \t,;:=$*\"'`>|，、：", " \t,;:=$*\"'`<|.!?+-–—/\\，、。！"
_UNIT = re.compile(UNIT)
_UNITS = re.compile(
    r"(?!.*\b(?:or|not|to|more|less|squared|cubed|factorial|dozens?|mod|modulo)\b)"
    r"[^\W\d_]+(?:\.?[\s/]+[^\W\d_]+){0,2}(?:\^\{?-?\d\}?)?"
)
_CHOICE = re.compile(
    r"(?:(?i:option|choice)\s+)?"
    r"(?:\(([A-J])\)|([A-J])(?=[).,:;]|\s*$|\\\s|\s+\(|\s+(?:because|since|as|is)\b))"
    r"(?!\s*(?:(?:[,/&]|or\b|and\b)\s*\(?[A-J]\b|\([A-J]\)))"  # who names several has chosen none
)
_RIGHT_CHOICE = re.compile(
    r"(?<!\b[Ii]f )(?<!\b[Oo]nly )(?<!\b[Ww]hether )\(?\b[A-J]\)?"
    r"(?=\s+(?:is|must be)\s+(?:the\s+)?(?:correct|right|best)\b(?!\s+(?:only|if)\b))"
)
Choose = Callable[[str], str | None]


def answer_of(completion: str, gold: str = "") -> str | None:
    """The final answer in a completion, or None. Where the reference is a choice, as B, its letter of "(B) 12 cm".

    Of what follows the last `</think>`, if anything does, the latest of `\\boxed{}`, `####` and "answer is" counts; if
    the latest box is not closed, the completion was cut off. Else the last bold text, if it is an answer and none
    follows; else the whole text, if it is an expression, else its last `$...$`, `\\(...\\)` or `\\[...\\]`, else the
    last expression between its words.
    """
    completion = _NEGATIVE.sub("-", completion[-20 * MOST_CHARACTERS :])
    _, _, said = completion.rpartition("</think>")
    completion = _CODE.sub("\n", said if said.strip() else completion)
    if "<think>" in said:  # it ended before an answer was given
        return None
    found = _marked_answer(completion, gold)
    bold = list(_BOLD.finditer(completion))
    between = completion[bold[-2].end() : bold[-1].start()] if len(bold) > 1 else ""
    is_one = len(between) > _NEAR or not _LINK.fullmatch(between)
    if found is None and bold and is_one and not _expressions(completion[bold[-1].end() :]):
        found = _answer_in(bold[-1][1], gold, quantity)
    if found is None:
        found = _chosen(completion) if _is_choice(gold) else _answer_in(completion, gold, _last_expression)
    if not found or len(found) > MOST_CHARACTERS:
        return None
    if found.endswith("!") and bare(found) == gold and found != completion and completion.rstrip().endswith(found):
        return bare(found)  # it is said loudly, and no factorial
    return _with_unit(found, completion) if unit_of(gold) else found


def boxed(text: str) -> str | None:
    """What is in the last `\\boxed{}` or `\\fbox{}` that is closed and not empty, or follows `\\boxed ` as one sign."""
    found = [inside for _, _, inside in _boxes(text) if inside] or _ONE_BOXED.findall(text)
    return found[-1].strip() if found else None


def quantity(text: str) -> str | None:
    """The number of a text that is one number or expression and its unit, as "5 meters"; None if it is not."""
    found = _expressions(text)
    if len(found) != 1:
        return None
    before, _, after = TEXT.sub(r" \1 ", text).partition(found[0])
    after = _trimmed(after)
    return found[0] if not _trimmed(before) and (not after or _UNITS.fullmatch(after)) else None


def expressions(text: str) -> list[str]:
    """All that a text holds of mathematics, marked as such or not."""
    return [*_maths(text), *_expressions(text)]


def value_of(answer: str) -> str:
    """An answer without the words for its unit."""
    return (quantity(answer) if is_prose(answer) else None) or answer


def _marked_answer(text: str, gold: str) -> str | None:
    """The answer that is marked as one; None where none is, and empty where it was cut off."""
    boxes = _boxes(text)
    marks = list[tuple[int, str | None, Choose]]()
    for start, _, inside in boxes:
        if inside and _CUE.search(inside):
            inside = _CUE.split(TEXT.sub(r"\1", inside))[-1]
        marks.append((start, inside, str))
    cues = [cue for cue in _CUE.finditer(text) if not any(start < cue.start() < end for start, end, _ in boxes)]
    for cue, end in zip(cues, [*(cue.start() for cue in cues[1:]), len(text)], strict=False):
        if said := _CUED.match(text, cue.end(), end):
            marks.append((cue.start(), said[1], _leading_expression if cue[0] == "####" else _first_expression))
    if _is_choice(gold) and not marks:
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
    text = _DECORATION.sub("", text.strip()).rstrip(".").strip("*` \n")
    if said_again := _SAID_AGAIN.fullmatch(text):
        text = said_again[1] or said_again[2]
    if word_of(gold) is not None:
        return re.split(r"(?i)\b(?:is|are|was|were)\b", text)[-1].strip() or None
    return choose(text) if is_prose(text) else text or None


def _last_expression(text: str) -> str | None:
    found = _runs(_maths(text) or _expressions(text), text)
    while found:
        before, last, after = text.rpartition(found[-1])
        if _QUESTION.match(after) or (last and _is_denied(before, after)):
            return None
        if len(found) == 1 or not _INSTEAD.search(before[-_NEAR:]):
            return found[-1]
        found.pop()  # 4 of "5, not 4"
        text = before
    return None


def _undenied(found: str, before: str, _: str, after: str) -> str | None:
    return None if _is_denied(before, after) else found


def _is_denied(before: str, after: str) -> bool:
    """Whether a sentence says that what stands between these is not the answer, or only a bound of it."""
    before = before[-_NEAR:]
    return not _INSTEAD.search(before) and bool(_DENIED.search(before)) or bool(_REFUTED.match(after[:_NEAR]))


def _runs(found: list[str], text: str) -> list[str]:
    """The parts of a text, where those that "and", "or" or a comma links are one: 1, 2 of "x is $1$ or $2$"."""
    runs, end = list[str](), 0
    for part in found:
        start = text.find(part, end)
        link = _LINK.fullmatch(text, end, start) if runs and 0 <= start - end < _NEAR else None
        if link and (link[1] or "=" not in part):
            runs[-1] += f" {(link[1] or ',').strip(', ') or ','} {part}"
        else:
            runs.append(part)
        end = start + len(part) if start >= 0 else end
    return runs


def _leading_expression(text: str) -> str | None:
    found = _expressions(text)
    return found[0] if found and not _trimmed(text.partition(found[0])[0]) else None


def _first_expression(text: str) -> str | None:
    """That of what follows "answer is": its first, unless it begins otherwise or is calculated there."""
    text = ([part for part in _CORRECTED.split(text) if _expressions(part)] or [text])[-1]
    if maths := _runs(_maths(text), text):
        return _undenied(maths[0], *text.partition(maths[0]))
    if not (found := _expressions(text)):
        return None
    before, _, after = text.partition(found[0])
    if _ALTERNATIVE.match(after):
        return None
    words = re.findall(r"[^\W\d_]{2,}", before)
    is_first = "=" not in _CLAUSE.split(after)[0] and len(words) < 2 and words != ["not"]
    if is_first:
        return _undenied(found[0], before, found[0], after)
    return _undenied(found[-1], *text.rpartition(found[-1]))


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
    for sign in DELIMITER.finditer(text):
        inside = text[opened.end() : sign.start()] if opened and sign[0] == _CLOSES[opened[0]] else ""
        ends_open = inside.rstrip()[-1:] in {*"+-*/=×÷"} or text[sign.end() : sign.end() + 1].isdigit()
        is_money = sign[0] == "$" and ("\n" in inside or ends_open or is_prose(inside))  # two sums of it, and not maths
        if opened and inside.strip() and not is_money:
            found.append(inside.strip().rstrip(".,"))
            opened = None
        elif sign[0] in _CLOSES:
            opened = sign
    return found


def _expressions(text: str) -> list[str]:
    """What is between the words of a sentence and holds a number or a command."""
    parts = _WORD.sub(lambda word: word[1] or "\n", _BREAK.sub("\n", TEXT.sub(r" \1 ", text))).splitlines()
    found = [_trimmed(part.lstrip(" )").rstrip(" (")) for part in parts]
    found = [part if part.count("(") == part.count(")") else _trimmed(part.strip("()")) for part in found]
    found = [re.sub(r"^[^A-Za-z\\]*=\s*", "", part) for part in found]  # 7 of 3 + 4 = 7
    return [part for part in found if re.search(r"\d|\\[A-Za-z]|[∞√π½-¾]", part)]


def _trimmed(part: str) -> str:
    """Without the punctuation and the "and" around it, and a dash before it."""
    part = part.strip(_LEFT_EDGE).rstrip(_RIGHT_EDGE).removeprefix("and").removesuffix("and")
    return re.sub(r"^[-–—+]\s+", "", part.lstrip(_LEFT_EDGE)).rstrip(_RIGHT_EDGE)


def is_prose(text: str) -> bool:
    """Whether a text has words in it, and not only those of formulas."""
    words = (word[2].lower() for word in _WORD.finditer(TEXT.sub(" ", text)) if word[2])
    return any(len(word) > 2 or word in _SHORT_WORDS or re.match(_CJK, word) for word in words)


def bare(text: str) -> str:
    """Without the signs of LaTeX and of sentences around it."""
    return TEXT.sub(r"\1", text).strip(" $().!*\n")


def word_of(gold: str) -> str | None:
    """A text, a single word or a choice (A to J) that stands for itself; None for mathematics."""
    text = bare(gold)
    is_text = TEXT.fullmatch(gold.strip(" $")) and re.search(r"[^\W\d_]{3,}", text)
    is_word = re.fullmatch(r"[^\W\d_]{3,}", text) and is_prose(text) or text.lower() == "no"
    return text if is_text or is_word or _is_choice(gold) else None


def unit_of(answer: str) -> frozenset[str]:
    """The unit of an answer by its name, as in "5 meters", and the beginnings of other words, as in "5 red apples"."""
    answer = TEXT.sub(r" \1 ", answer).strip()
    if found := measured(answer):
        return frozenset({found[1]} - {""})
    words = answer.removeprefix(value_of(answer)).strip()
    unit = _UNIT.match(words)
    named = {name_of(unit[0])} if unit else set()
    return frozenset(named | {word.lower()[:3] for word in re.findall(r"[^\W\d_]{2,}", _UNIT.sub("", words, count=1))})


def _with_unit(found: str, completion: str) -> str:
    """An answer with the unit of measurement that follows it where it stands last."""
    places = list(re.finditer(rf"(?<![\d.,]){re.escape(found)}(?!\d)\s*({UNIT})?", TEXT.sub(r" \1 ", completion)))
    return f"{found} {places[-1][1]}" if places and places[-1][1] else found


def _is_choice(gold: str) -> bool:
    return re.fullmatch(r"[A-J]", bare(gold)) is not None


def _bare_start(text: str) -> str:
    return re.sub(r"\\[()\[\]]|[$*\"'“”‘’]", "", TEXT.sub(r"\1", text)).strip()


def _chosen(text: str) -> str | None:
    """The choice that the last sentence with one in it names, if it names one and does not reject it."""
    if _OPTIONS.search("\n" + text.strip()):
        return None
    for sentence in reversed(re.split(r"(?<=[.!?])\s+|\n+", text)):
        sentence = _bare_start(sentence)
        if letters := {first or second for first, second in _LETTER.findall(sentence)}:
            return letters.pop() if len(letters) == 1 and not _REJECTED.search(sentence) else None
    return None
