"""Verification of answers: the public cases, hostile ones, and the life of the pool."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from reasoning.extraction import answer_of
from reasoning.verifier import Verifier

CASES = [
    ("4", r"4\sqrt{2}", False),
    (r"\sqrt{1/n}", r"1/\sqrt{n}", True),
    ("n=2,3,4", "n=1,2,3", False),
    ("1-1/e", "1+1/e", False),
    (r"\pm 2021", "2021", False),
    (r"\pm 2021", r"\{-2021, 2021\}", True),
    (r"(3,\pi/2)", r"(3,2\pi/3)", False),
    ("3x-y+13=0", "3x+4y+14=0", False),
    ("2x+4y-3=0", "y=-x/2+3/4", True),
    (r"\text{13}", "13", True),
    (r"\frac12", r"\frac{1}{2}", True),
    (r"\frac{2}{3}", "2/3", True),
    ("-1 + exp(16)", "e^{16}-1", True),
    ("pi/2", r"\dfrac{\pi}{2}", True),
    ("14.0 + -1.0i", "14 - i", True),
    ("There are 234 marbles in all. He loses some, so that he has\n**73**", "73", True),
    (r"7.41\%", r"7.41\%", True),
    ("115,000", "115000", True),
    ("12,34", "1234", False),
    (r"The answer goes into \boxed , as asked: \boxed{7}", "7", True),
    ("$29.00", "29", True),
    ("#### -3", "-3", True),
    (r"\boxed{64/400}", "63/400", False),
    ("7425000", "7,425,000", True),
    (".4", "0.4", True),
    ("x>5", "x<5", False),
    (r"5 \ge x", r"x \le 5", True),
    ("28 percent", r"28\%", True),
    ("(p,q)=(3,2)", "(3,2)", True),
    (r"\boxed{004}", "4", True),
    ("50", "0.5", False),
    ("3,4", "34", False),
    ("5", "there is none", None),
    (r"\boxed{5}", "", None),
    (r"\text{Monday}", r"\text{monday}", True),
    ("The answer is (B).", "B", True),
    ("The answer is (C).", "B", False),
    ("The answer is B, because 5 is odd.", "5", True),
    (r"First \boxed{3}. No: \boxed{4}", "4", True),
    (r"First \boxed{3}. No: \boxed{4}", "3", False),
    ("I do not know", "3", False),
    ("50%", "50", False),
]
WRITTEN = [  # where the answer stands, and how
    ("The answer is:\n\n42", "42", True),
    ("The final answer is:\n$$\n42\n$$", "42", True),
    ("**Final Answer:**\n42", "42", True),
    ("**Final Answer**\n\n42", "42", True),
    (r"The answer is $\frac{1}{2}$ of the total.", r"\frac{1}{2}", True),
    (r"The answer is $\frac{1}{2}$ of the total.", "2", False),
    (r"The answer is $x = 5$ because $3$ is odd", "5", True),
    (r"Thus \(x = \frac{1}{2}\).", "1/2", True),
    (r"Thus \(x = \frac{1}{2}\).", "2", False),
    (r"Thus we get \[x = \frac{1}{2}.\]", "1/2", True),
    ("So we get\n$$\n\\frac{1}{2}\n$$", "1/2", True),
    (r"So the result is -\frac{1}{2} in all", "-0.5", True),
    (r"\boxed{\frac{1}{2} hours}", "2", False),
    ("It is 1,234 km", "1234", True),
    ("He pays $5 for apples and $7 for pears, so that he pays $12.", "12", True),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", True),
    (r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", r"\begin{pmatrix}1\\2\end{pmatrix}", False),
    (r"15\text{ cm}^2", "15", True),
    ("15", r"15\mbox{ cm}^2", True),
    ("10", r"10\text{ dollars}", True),
    ("10", r"11\text{ m/s}", False),
    (r"50\text{ percent}", "0.5", True),
    (r"5\text{ million}", "5", False),
    (r"6\text{ PM}", r"6\text{ AM}", False),
    ("The answer is (B) 42", "B", True),
    (r"\boxed{\textbf{(B)}\ 12}", "B", True),
    ("**B) oxygen**", "B", True),
    ("The correct answer is option C. A bus has 5 wheels", "C", True),
    ("(A) or (B)", "A", False),
    ("A, B", "A", False),
    ("A bus", "A", False),
    ("1 1/2", "3/2", True),
    ("1 1/2", "1", False),
    ("1 000 000", "1000000", True),
    (r"10\,000", "10000", True),
    ("1e-05", "0.00001", True),
    ("1e3", "3e", False),
    ("√2", r"\sqrt{2}", True),
    ("2516_8", "2516_9", False),
    ("2516_{8}", "2516_8", True),
    ("|x|", "x", False),
    (r"\sqrt{x^2}", "x", False),
    ("2,1", "(1,2)", False),
    ("1,2", "(1,2)", True),
    ("The answer is 1 and 2", "2", False),
    ("The answer is 1 and 2", "1,2", True),
]
LATEST = [  # of several answers
    ("The answer is A. No wait, the answer is D.", "A", False),
    ("The answer is A. No wait, the answer is D.", "D", True),
    ("The answer is $3$. Wait, the answer is $4$.", "3", False),
    ("The answer is 3. Wait, no, it is 4.", "4", True),
    (r"\boxed{3}. Wait, the answer is 4.", "3", False),
    (r"\boxed{3}. Wait, the answer is 4.", "4", True),
    ("#### 3 (see above), because it is odd", "3", True),
    ("The answer is 3.\n#### Step 4: check", "3", True),
    ("So it is (1, 2) (see above)", "(1,2)", True),
    ("So it is 3 (see above)", "3", True),
    ("#### 3\nWait, no: the answer is 4", "4", True),
    ("The answer is 3.\n#### 4", "4", True),
    (r"The answer is \boxed{3}. This answer is correct.", "3", True),
    (r"\boxed{The answer is 3}", "3", True),
    (r"so we get \boxed{4", "4", False),
    (r"The answer is \boxed{4", "4", False),
    (r"First \boxed{4}, so that \boxed{4", "4", False),
    ("The answer is 5 apples and 2 remain", "5", True),
    ("The answer is 5 apples and 2 remain", "2", False),
    ("The answer is 12 of the 20 apples", "12", True),
    ("The answer is 3 apples and 4 more = 7", "7", True),
    ("The answer is what is left of 20 apples, 8", "8", True),
    ("**Step 2: Multiply**\nThis gives 12", "12", True),
    ("It is 12.\n**Check**", "12", True),
    ("**Step 1:** 3\n**2.** So it is 12", "12", True),
    ("He has **12 apples** now.", "12", True),
]
SENTENCES = [  # money, reasons, second thoughts, alternatives, signs and relations in words
    *((text, "30", True) for text in ("So the total is $18 + $12 = $30.", "**Total:** $18 + $12 = $30")),
    ("So the total is $18 + $12 = $30.", "18", False),
    ("Profit = $200 - $130 = $70.", "70", True),
    ("Profit = $200 - $130 = $70.", "200", False),
    ("9 * $2 = $18.", "18", True),
    ("9 * $2 = $18.", "2", False),
    ("The answer is $12. She pays $5 + $7 = $12 for 2 books.", "12", True),
    ("The answer is $12. She pays $5 + $7 = $12 for 2 books.", "5", False),
    ("She has $5 and $7.", "5", False),
    ("The answer is 18, since 9 * 2 = 18 dollars for 9 eggs.", "18", True),
    ("The answer is 18, since 9 * 2 = 18 dollars for 9 eggs.", "9", False),
    ("The answer is 18 because 16 - 3 - 4 = 9 and 9 * 2 = 18.", "18", True),
    ("The answer is 5 apples + 3 apples = 8 apples", "8", True),
    ("The answer is 5. Sorry for the 2 mistakes above.", "5", True),
    ("The answer is 5 minutes to wait for 3 trains.", "5", True),
    ("The answer is 5 actually, not 6.", "5", True),
    ("The answer is 5, no wait, 6.", "6", True),
    ("The answer is 5. Actually, it is 6.", "6", True),
    ("The answer is 5. Actually it is 6.", "6", True),
    ("<think>the answer is 5</think> It is **6**.", "6", True),
    ("<think>the answer is 5</think> It is **6**.", "5", False),
    (r"<think>\boxed{5}</think>\boxed{6}", "6", True),
    ("<think>so it is 5</think>", "5", True),
    ("The answer is either 18 or 20.", "18", False),
    ("The answer is 3 over 4.", "3", False),
    ("The answer is negative 5.", "-5", True),
    ("It is minus 5.", "5", False),
    *(
        (rf"\boxed{{{text}}}", "73", False)
        for text in ("> 73", r"\le 73", r"\neq 73", "73+", r"1, 2, \ldots, 73", "≥73")
    ),
    ("x > 2", "x>2", True),
]
FRAGMENTS = [  # numbers that are a part of the answer
    (r"\boxed{3xyz}", "3", False),
    (r"\boxed{xyz+1}", "1", False),
    (r"\boxed{arctan(2)}", "2", False),
    (r"\boxed{2^{10} dollars}", "10", False),
    (r"\boxed{2^{10} dollars}", "1024", True),
    (r"\boxed{2\sqrt{3} meters}", "3", False),
    (r"\boxed{2\sqrt{3} meters}", r"2\sqrt{3}", True),
    (r"\boxed{not 5}", "5", False),
    (r"\boxed{5 or 6}", "6", False),
    (r"\boxed{1 hour 30 minutes}", "30", False),
    (r"\boxed{x = 5 meters}", "5", True),
    (r"\boxed{5 apples}", "5", True),
    (r"The answer is 2\sqrt{3} meters.", "3", False),
    (r"The answer is 2\sqrt{3} meters.", r"\sqrt{12}", True),
    (r"it is 2\sqrt{3}", "3", False),
    (r"So it is 2\pi", "2", False),
    ("It is 2x+3", "3", False),
    ("It is 2x+3", "3+2x", True),
    ("It is xy + 1", "1", False),
    ("so it is 2^3", "3", False),
    ("so it is 1.5 × 10^3", "3", False),
    ("so it is 1.5 × 10^3", "1500", True),
    ("so it is 3 / 4", "4", False),
    ("so it is 3 / 4", "0.75", True),
    ("so it is 1 000 000", "0", False),
    ("so it is 1 000 000", "1000000", True),
    ("so it is (1,2)", "2", False),
    ("so it is (1,2)", "(1,2)", True),
    ("It is 15 cm^2 in all", "15", True),
    ("It is 5 million", "5", False),
    ("It is 5 million", "5000000", True),
    ("It is 5 m long, or a 5 km/h wind", "5", True),
    ("He does it 3 + 4 = 7 times", "7", True),
    ("It is −7", "-7", True),
    ("It is −7", "7", False),
    ("It is –7", "-7", True),
    ("It is 5–7 km", "7", False),
    ("20-year-old", "20", True),
]
CHOICES = [
    "The correct option is C",
    "So the correct choice is (C).",
    "Therefore, C is correct.",
    "The best answer choice is C.",
    "Answer (C)",
    "the correct answer would be C",
    "Answer: C (5 m)",
    "Final choice: C",
    "<answer>C</answer>",
    "<answer>\nC\n</answer>",
    r"\boxed{\mathbf{C}}",
    r"\boxed{\textrm{C}}",
    "It is C",
    r"$\boxed{\text{C}}$, and A is correct only if x=0",
    "The answer is C because A is the correct value of x",
    "<think>D is correct</think> The option is C.",
    "(A) is wrong. (B) is wrong. Hence (C).",
    "A: wrong\nC: right",
    "A is incorrect. The correct one is C.",
    r"The answer is \(C\).",
    'The answer is "C".',
    r"\(\text{C}\)",
    r"\boxed{\text{Answer: C}}",
    "thus C",
    "therefore (C)",
    "I would choose C.",
]
NO_CHOICES = [
    "It could be A or C.",
    "(A) or (C)",
    "If C is correct, then x=0",
    "The answer is not C.",
    "C is wrong.",
    "Cats",
]
NOTATION = [
    ("½", "1/2", True),
    ("2½", "5/2", True),
    ("∞", r"\infty", True),
    ("x²", "x^2", True),
    ("x²", "x^3", False),
    ("x=5", "y=5", False),
    (r"2\frac{1}{2}", "21/2", False),
    (r"\left( 1,\, \frac12 \right)", r"(1,\dfrac{1}{2})", True),
    ("€5", "5", True),
    ("£5", "5", True),
    (r"0.\overline{3}", r"\frac13", True),
    (r"0.1\overline{6}", "1/6", True),
    (r"0.\overline{3}", "0", False),
    (r"x=50\%", "0.5", True),
    (r"x=50\%", "50", False),
    (r"50\%,25\%", "50,25", False),
    (r"50\%,25\%", "0.5,0.25", True),
    (r"\frac{1}{2}\%", "0.005", True),
    ("(1,2)", "2,1", False),
    ("(1,2)", "1,2", True),
    ("Friday", r"\text{Friday}", True),
    ("It is Friday.", r"\text{Friday}", True),
    ("It is not Friday.", r"\text{Friday}", False),
    ("yes", r"\text{yes}", True),
    (r"\text{Yes}", "Yes", True),
    ("No", "Yes", False),
    ("5", "5 dollars", True),
    ("The answer is 5 dollars.", "5 dollars", True),
    ("5 cents", "5 dollars", False),
]
SIZES = [  # numbers that differ in the digits that count
    (r"1.6\times 10^{-19}", r"9.1\times 10^{-31}", False),
    (r"1.6\times 10^{-19}", r"0.16\times 10^{-18}", True),
    (r"\frac{1}{3000000}", "0.0000004", False),
    (r"\frac{1}{2500000}", "0.0000004", True),
    ("e^{-40}", "e^{-50}", False),
    ("1.234567890123456789012345678901", "1.234567890123456789012345678902", False),
    ("0.333333", r"\frac13", True),
    (r"\sqrt{3+2\sqrt{2}}-1-\sqrt{2}", "0", True),
    ("10^{-9}", "0", False),
    ("0", "10^{-9}", False),
    (r"\infty", "5", False),
    (r"∞\%", r"\sqrt{2}+\pi", False),
    (r"-\infty", r"\infty", False),
    ("1000000i", "1000001i", False),
    ("3+4i", "4i+3", True),
    ("0.33", r"\frac13", False),
]
GOLD = [r"\frac{\sqrt{3}}{2}", r"[2, 5)", r"\{1,2\}", r"x^2+2x+1", r"\text{Evelyn}", "C", "3.25", r"90^\circ", "-7"]
ODD = [r"e^{it}", r"\operatorname{arcsin}(1/2)", r"\begin{array}{ccc}1&2&3\\4&5&6\end{array}", "5 dollars", "5 meters"]
ODD += [r"\textrm{even}", r"\overline{ABC}", "arctan(2)", "cot x", "max(a,b)", "3xyz", "Yes", "5 million"]
LAZY = "9^{9^{9^{9^{9}}}}"
HOSTILE = [
    LAZY,
    r"\boxed{" + "1+" * 5000 + "1}",
    r"\boxed{" + "(" * 400 + ")" * 400 + "}",
    r"\frac{" * 300 + "1" + "}{2}" * 300,
    r"\sqrt{" * 200 + "x" + "}" * 200,
    "\\" * 3000,
    "{" * 3000,
    r"\boxed{" * 3000,
    "１２３ ٣٤ 𝟙𝟚 ∞ ½ ﷽ \u202e\u0000",
    r"\int_0^1 x^{x^{x}} dx",
    "1e999999999",
    "0." + "1" * 900,
    "1000000!!!",
    r"\def\x{\x\x}\x",
    "$" * 2001,
    "**" * 2001,
]


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(timeout_s=2.0) as verifier:
        yield verifier


@pytest.mark.parametrize(
    ("prediction", "gold", "verdict"), [*CASES, *WRITTEN, *LATEST, *SENTENCES, *FRAGMENTS, *NOTATION, *SIZES]
)
def test_reported_cases(verifier: Verifier, prediction: str, gold: str, verdict: bool | None) -> None:
    assert verifier.verify(prediction, gold) is verdict


@pytest.mark.parametrize("text", CHOICES)
def test_a_choice_is_read_however_it_is_named(verifier: Verifier, text: str) -> None:
    assert verifier.verify_all([(text, "C"), (text, "D")]) == [True, False]


@pytest.mark.parametrize("text", NO_CHOICES)
def test_what_is_not_chosen_is_no_choice(verifier: Verifier, text: str) -> None:
    assert verifier.verify_all([(text, letter) for letter in "ACD"]) == [False] * 3


def test_the_order_of_equal_answers_makes_no_difference(verifier: Verifier) -> None:
    answers = [(p, g) for p, g, verdict in CASES if verdict and answer_of(p) == p]
    assert verifier.verify_all([(gold, prediction) for prediction, gold in answers]) == [True] * len(answers)


@pytest.mark.parametrize(
    "gold", [*GOLD, *ODD, *(gold for _, gold, verdict in [*CASES, *WRITTEN, *NOTATION] if verdict is not None)]
)
def test_an_answer_equals_itself(verifier: Verifier, gold: str) -> None:
    assert verifier.verify(gold, gold) is True


def test_a_completion_that_was_cut_off_has_no_answer(verifier: Verifier) -> None:
    assert verifier.verify(None, "4") is False
    assert verifier.verify(r"so we get \boxed{4", "7") is False


def test_an_endless_comparison_is_stopped_and_reported_and_the_pool_lives() -> None:
    with Verifier(timeout_s=0.5) as verifier:
        assert verifier.verify_all([(LAZY, "x+1"), ("1+x", "x+1"), ("2+x", "x+1")]) == [None, True, False]
        assert (verifier.counts.timeouts, verifier.counts.undecided) == (1, 1)
        assert (verifier.counts.right, verifier.counts.wrong) == (1, 1)


def test_hostile_strings_are_never_right_and_leave_the_pool_alive() -> None:
    with Verifier(processes=2, timeout_s=0.5) as verifier:
        predicted = verifier.verify_all([(text, r"\frac{1}{7}") for text in HOSTILE])
        as_gold = verifier.verify_all([("4", text) for text in HOSTILE])
        assert len(predicted) == len(as_gold) == len(HOSTILE)
        assert set(predicted) | set(as_gold) <= {False, None}
        assert (verifier.counts.right, verifier.counts.wrong + verifier.counts.undecided) == (0, 2 * len(HOSTILE))
        assert verifier.verify("1/7", r"\frac{1}{7}") is True


def test_random_hostile_strings_leave_the_pool_alive_and_its_memory_bounded() -> None:
    draw = random.Random(0)
    pieces = [
        r"\frac{",
        "}{",
        "}",
        r"\sqrt{",
        r"\boxed{",
        "(",
        ")",
        "^",
        "x",
        "1",
        "9",
        "+",
        "=",
        r"\pm",
        "!",
        ",",
        "%",
        "∞",
    ]
    pairs = [("".join(draw.choices(pieces, k=draw.choice([3, 10, 40, 400]))), draw.choice(GOLD)) for _ in range(200)]
    with Verifier(timeout_s=0.5) as verifier:
        assert verifier.verify_all(pairs).count(True) <= 2  # a gold answer may come up by chance
        memory = sum(child.memory_info().rss for child in psutil.Process().children())
        assert verifier.verify("2/14", r"\frac{1}{7}") is True and memory < 1e9


def test_a_module_of_the_same_name_in_the_working_directory_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reasoning.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    with Verifier() as verifier:
        assert verifier.verify("1/2", r"\frac{2}{4}") is True


@pytest.mark.parametrize(
    ("module", "name", "value", "told"),
    [
        ("reasoning.verifier", "START_S", 0.0, "has not started within 0 s: is it too busy"),
        ("sys", "executable", "/bin/false", "pip install"),
    ],
)
def test_a_process_that_is_slow_is_told_from_one_that_cannot_start(
    module: str, name: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{module}.{name}", value)
    with Verifier() as verifier, pytest.raises(RuntimeError, match=told):
        verifier.verify("1/2", r"\frac{2}{4}")


def test_works_in_a_thread() -> None:
    found = []

    def work() -> None:
        with Verifier() as verifier:
            found.append(verifier.verify("1/2", r"\frac{2}{4}"))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]
