"""`embodied-rl eval`: a model's accuracy on a benchmark, and what it wrote on every problem."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from embodied_rl.console import reported
from reasoning import evaluate
from reasoning.config import MathConfig
from reasoning.data import DataError, load, without_long
from reasoning.models import ModelError, encode, load_tokenizer
from reasoning.team import MathTeam
from scheduler.cluster import Cluster


def run_benchmark(config: MathConfig, samples: int, temperature: float, out: Path) -> int:
    """Sample, judge, print the estimates, and write `problems.jsonl` and `result.json`; the exit code.

    Args:
        samples: completions of each problem; a single one is taken at temperature 0.
        out: the folder of both, which is there.
    """
    try:
        tokenizer, longest = load_tokenizer(config.model.path), config.data.max_prompt_tokens
        loaded = without_long(load(config.data, held_out=True), lambda p: len(encode(tokenizer, p)), longest)
    except (DataError, ModelError) as error:
        print(error, file=sys.stderr)
        return 2
    temperature = temperature if samples > 1 else 0.0
    with reported(None):
        there = config.cluster
        with Cluster(there.address, there.cpu_slots, there.timeout_s) as cluster:
            team = MathTeam(config, cluster, ("sampler", "judge"))
            judged = team.evaluate(loaded.problems[: config.evaluation.problems], samples, temperature)
            verdicts = team.verdicts()
            team.close()
        found = evaluate.accuracy(judged)
        evaluate.show("completions", *evaluate.table(judged, config.evaluation.completions))
        for name, estimate in found.items():
            print(f"{name:10} {estimate}")
        left_out = f"; left out: {loaded.long} too long, {loaded.bad} bad lines" if loaded.long + loaded.bad else ""
        counted = ", ".join(f"{count} {name}" for name, count in verdicts.items())
        print(f"{len(judged)} problems{left_out}; {counted}", flush=True)
        evaluate.write(judged, out / "problems.jsonl")
        content = {name: vars(estimate) for name, estimate in found.items()}
        about = {"model": config.model.path, "benchmark": config.data.test, "problems": len(judged)}
        about |= {"samples": samples, "temperature": temperature, "too_long": loaded.long, "bad_lines": loaded.bad}
        (out / "result.json").write_text(json.dumps({**about, "verdicts": verdicts, **content}, indent=1))
        print(f"result        {out / 'result.json'}")
        print(f"every problem {out / 'problems.jsonl'}")
        return 0
    return 1
