"""How answers are written: the many ways of one number or expression, brought to one."""

from __future__ import annotations

import re
import unicodedata

from reasoning.extraction import DELIMITER, FUNCTIONS, POWERS, TEXT

NUMBER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
IS_NUMBER = re.compile(rf"(?=[-+]?\.?\d)[-+]?{NUMBER}")
_THIN_SPACE = re.compile(r"(?<=\d)\\[,!; ](?=\d{3}(?!\d))")  # 10\,000
_MIXED = re.compile(r"(?<![\w.,/^{}])(\d+)\s+(\d+)/(\d+)(?![\w./^]|,\d{3}(?!\d))")
_POWER_OF_TEN = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d{1,3})(?![\w.])")
_SPACED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_REPEATING = re.compile(r"(?<![\w.])(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d{1,30})\}")
_PERCENT = re.compile(rf"(?<![\w./^}}])(?=\.?\d)({NUMBER})\s*(?:\\?%|percent\b)")
_APPROXIMATELY = re.compile(
    r"^[\s$]*(?:approximately|approx\.?|about|roughly|around|~|≈|\\approx|\\sim)(?![a-z])\s*(?=[-+\d\\$.])"
)
_SIGNS = str.maketrans(
    {"−": "-", "∞": r"\infty ", "×": r"\times ", "·": r"\cdot ", "÷": "/", "π": r"\pi ", "≤": r"\le ", "≥": r"\ge "}
    | {"∈": r"\in ", "∪": r"\cup ", "∅": r"\emptyset ", "±": r"\pm ", "⁄": "/"}
    | {"≈": r"\approx ", "≡": "=", "°": r"^\circ "}
    | dict.fromkeys("\u00a0\u2009\u202f", " ")
)
_COMMANDS = {  # by one name
    r"\\(?:text)?color\{[a-z]+\}": "",
    r"\\lbrace(?![a-z])": r"\\{",
    r"\\rbrace(?![a-z])": r"\\}",
    r"\\(?:[bB]ig{1,2}[lrm]?|displaystyle|large|Large)(?![a-z])": "",
    r"\{:\}": ":",
    r"\\langle(?![a-z])": "(",
    r"\\rangle(?![a-z])": ")",
    r"(?<=[\d)}\]])\.\s*$": "",
    r"\\\{\s*\\\}": r"\\emptyset ",
    r"\\equiv(?![a-z])": "=",
    r"\\varnothing": r"\\emptyset",
    r"\+/-(?=\s*[\d\\])": r"\\pm ",  # 3+-2 is 1
    r"(?<=\d)\s*[xX]\s*(?=\\?\$?\d)": r" \\times ",
    r"\s*\n\s*(?=[A-Za-z]\s*=)": ", ",
}


def plain(text: str) -> str:
    """Without currencies, delimiters and LaTeX's commands for text; signs of Unicode as LaTeX has them."""
    text = re.sub(r"[⁰¹²³⁴-⁹⁺⁻]+", lambda found: f"^{{{unicodedata.normalize('NFKC', found[0])}}}", text)
    for command, name in _COMMANDS.items():
        text = re.sub(command, name, text)
    text = re.sub(r"\\?\$|[€£]", "", TEXT.sub(r"\1", _APPROXIMATELY.sub("", text))).translate(_SIGNS)
    text = re.sub(r"(?<![\w)])–(?=[\d.])", "-", text)
    text = re.sub(r"(?<=\d)(?=[¼-¾⅓-⅞])", " ", text)
    text = re.sub(r"[¼-¾⅓-⅞]", lambda found: unicodedata.normalize("NFKC", found[0]).replace("⁄", "/"), text)
    text = DELIMITER.sub("", _THIN_SPACE.sub("", text)).strip()
    return text.replace(" ", "") if _SPACED.fullmatch(text) else text


def squeezed(text: str) -> str:
    """Without spaces, but for a mark between two numbers: 1 1/2 is not 11/2."""
    text = re.sub(r"(?<=\d)(?:[\s~]|\\[,;: ])+(?=\.?\d)", "\x1f", plain(text))
    text = re.sub(r"[^\S\x1f]+|\\left|\\right|\\[,;:! ]", "", text)
    return re.sub(r"\\[dt]?frac(?:\{(\d+)\}|(\d))(?:\{(\d+)\}|(\d))", r"(\1\2/\3\4)", text)


def latex(text: str) -> str:
    """What math-verify parses."""
    text = re.sub(rf"(?<![\\A-Za-z])({FUNCTIONS})(?![A-Za-z])", r"\\\1", plain(text))
    text = re.sub(r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}", text)
    text = re.sub(r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}", text)
    text = re.sub(rf"(?<=\d)\s*({'|'.join(POWERS)})\b", lambda found: rf" \times 10^{POWERS[found[1]]}", text)
    text = _REPEATING.sub(_fraction, text)
    text = _MIXED.sub(r"(\1+\2/\3)", _POWER_OF_TEN.sub(r"\1 \\times 10^{\2}", text))
    text = re.sub(r"√\s*(\d+|[a-z]|\([^()]*\))", r"\\sqrt{\1}", text)
    text = _PERCENT.sub(r"(\1/100)", text)
    return re.sub(r"([^=]+?)\s*(?:\\?%|percent)\s*$", r"\\frac{\1}{100}", text)


def _fraction(repeating: re.Match[str]) -> str:
    """Of 0.1\\overline{6}: 15/90."""
    whole, before, period = repeating.groups()
    value = int(whole + before + period) - int(whole + before or 0)
    return f"({value}/{10 ** len(before) * (10 ** len(period) - 1)})"
