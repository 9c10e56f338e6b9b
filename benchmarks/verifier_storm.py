"""Throws hostile answers at the verifier and shows that its pool lives and its memory stays flat.

    python benchmarks/verifier_storm.py [COUNT]        default 10000

Prints, each tenth of the way: verdicts, comparisons that were stopped, memory of the pool, and whether a plain
comparison still works.
"""

from __future__ import annotations

import random
import sys
import time

import psutil

from reasoning.verifier import Verifier

GOLD = [r"\frac{1}{7}", r"x^2+1", r"\{1,2,3\}", r"[2,5)", r"\sqrt{2}+\pi", r"y=2x+1"]
PIECES = [
    r"\frac{", "}{", "}", "{", r"\sqrt{", r"\boxed{", "(", ")", "^", "_", "x", "y", "1", "9", "+", "-", "=", "<",
    r"\pm", r"\int_0^1", r"\sum_{n=1}^{\infty}", "!", ",", ";", "%", "$", "∞", "½", "\u202e", "\u0000", "١",
    r"\begin{pmatrix}", r"\end{pmatrix}", "&", r"\\", "e^", "10^{10^{10}}", "sin(", "log", " ", "\n", "**", "####",
]  # fmt: skip
BOMBS = ["9^{9^{9^{9}}}", "(" * 900, r"\sqrt{" * 150 + "x" + "}" * 150, "1000000!!", "x^{" * 150 + "x" + "}" * 150]


def hostile(draw: random.Random) -> str:
    if draw.random() < 0.01:
        return draw.choice(BOMBS)
    text = "".join(draw.choice(PIECES) for _ in range(draw.choice([3, 10, 30, 300])))
    return draw.choice([text, rf"\boxed{{{text}}}", f"The answer is {text}"])


def main() -> None:
    count, draw = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000, random.Random(0)
    own, start = psutil.Process(), time.monotonic()
    with Verifier(processes=2, timeout_s=1.0) as verifier:
        for tenth in range(10):
            verifier.verify_all([(hostile(draw), draw.choice(GOLD)) for _ in range(count // 10)])
            memory = [process.memory_info().rss / 1e6 for process in (own, *own.children())]
            alive = verifier.verify("2/14", r"\frac{1}{7}")
            print(
                f"{(tenth + 1) * count // 10:6} strings, {time.monotonic() - start:5.0f} s, {verifier.counts}, "
                f"{memory[0]:.0f} MB here, {sum(memory[1:]):.0f} MB in the pool, {'alive' if alive else 'DEAD'}",
                flush=True,
            )


if __name__ == "__main__":
    main()
