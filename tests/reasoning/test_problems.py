"""Problems: formats, bad lines, length, generated sets, order."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from reasoning.config import DataConfig
from reasoning.data import DataError, Loaded, Order, load, read, without_long
from reasoning.tasks import TASKS, generated


def jsonl(path: Path, rows: list) -> Path:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_plain_and_chat_prompts_with_columns_by_config(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    rows = [{"q": "2+2?", "a": 4, "level": 1}, {"q": chat, "a": "2", "level": 2}]
    config = DataConfig(prompt_column="q", answer_column="a", instruction="Only the number.")
    first, second = read(jsonl(tmp_path / "p.jsonl", rows), config).problems
    assert (first.prompt, first.answer, first.columns) == ("2+2?\nOnly the number.", "4", {"level": 1})
    assert second.prompt == [chat[0], {"role": "user", "content": "1+1?\nOnly the number."}]
    assert first.id == "p#1"


def test_parquet_gives_what_jsonl_gives(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(5)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    jsonl(tmp_path / "p.jsonl", rows)
    assert read(tmp_path / "p.parquet", DataConfig()).problems == read(tmp_path / "p.jsonl", DataConfig()).problems


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("{broken", "not JSON"),
        ('["a list"]', "not a JSON object"),
        ({"prompt": "x"}, "no column 'answer'"),
        ({"prompt": "", "answer": "1"}, "expected a text or a list of messages"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "'role' and 'content'"),
        ({"prompt": ["x"], "answer": "1"}, "'role' and 'content'"),
        ({"prompt": "x", "answer": " "}, "the answer is empty"),
        ({"prompt": "x", "answer": None}, "'answer' is None; expected a text or a number"),
        ({"prompt": "x", "answer": ["1", "2"]}, "expected a text or a number"),
        ({"prompt": "x", "answer": float("nan")}, "expected a text or a number"),
        ({"prompt": "x", "answer": float("inf")}, "'answer' is inf; expected a text or a number"),
        ('{"prompt": "x", "answer": 1e400}', "'answer' is inf; expected a text or a number"),
        ('{"prompt": "\\ud800", "answer": "1"}', "half a character"),
        ({"prompt": [{"role": "user", "content": "\ud800"}], "answer": "1"}, "half a character"),
        ('{"prompt": "x", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}", "not JSON"),
    ],
)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, bad: object, told: str) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"prompt": "1+1?", "answer": "2"}, bad, {"prompt": "2+2?", "answer": "4"}])
    with pytest.raises(DataError, match="p.jsonl, line 2") as error:
        read(path, DataConfig())
    assert told in str(error.value)
    loaded = read(path, DataConfig(skip_bad_lines=True))
    assert (len(loaded.problems), loaded.bad) == (2, 1)


def test_a_line_that_is_no_text_is_a_bad_one(tmp_path: Path) -> None:
    good = json.dumps({"prompt": "1+1?", "answer": "2"}).encode()
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + b'{"prompt": "\xff", "answer": "2"}\n' + good)
    with pytest.raises(DataError, match="p.jsonl, line 2: not JSON"):
        read(path, DataConfig())
    loaded = read(path, DataConfig(skip_bad_lines=True))
    assert (len(loaded.problems), loaded.bad) == (2, 1)


def test_a_file_that_is_no_parquet_is_named(tmp_path: Path) -> None:
    (tmp_path / "p.parquet").write_text("prompt,answer")
    with pytest.raises(DataError, match="p.parquet is no Parquet file"):
        read(tmp_path / "p.parquet", DataConfig())


@pytest.mark.parametrize("place", [slice(100, 2000), slice(-200, -8)], ids=["pages", "footer"])
def test_a_parquet_file_that_is_damaged_is_named(tmp_path: Path, place: slice) -> None:
    rows = [{"prompt": f"{n}+1?", "answer": str(n + 1)} for n in range(2000)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    content = bytearray((tmp_path / "p.parquet").read_bytes())
    content[place] = bytes(byte ^ 0x5A for byte in content[place])
    (tmp_path / "p.parquet").write_bytes(content)
    with pytest.raises(DataError, match="p.parquet is no Parquet file"):
        read(tmp_path / "p.parquet", DataConfig())


@pytest.mark.parametrize("kind", ["text", "time"])
def test_a_row_of_parquet_that_python_cannot_hold_is_a_bad_line(tmp_path: Path, kind: str) -> None:
    good = pyarrow.array(["1+1?", "2+2?", "3+3?"])
    starts, text = pyarrow.array([0, 1, 2, 3], pyarrow.int32()).buffers()[1], pyarrow.py_buffer(b"a\xffb")
    bad = {
        "text": pyarrow.StringArray.from_buffers(3, starts, text),
        "time": pyarrow.array([0, 2**62, 0], pyarrow.timestamp("us")),
    }
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"prompt": good, "answer": good, "other": bad[kind]}), path)
    with pytest.raises(DataError, match="p.parquet, line 2: not a row"):
        read(path, DataConfig())
    loaded = read(path, DataConfig(skip_bad_lines=True))
    assert (len(loaded.problems), loaded.bad) == (2, 1)


def test_a_directory_is_told_from_a_file_that_is_missing(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").mkdir()
    with pytest.raises(DataError, match="p.jsonl is a directory"):
        read(tmp_path / "p.jsonl", DataConfig())


REFUSED = [
    12.5,
    True,
    "1000",
    -3,
    "twelve",
    float("inf"),
    None,
    "$33",
    r"\boxed{33",
    "33}",
    r"\boxed{1000}",
    "$",
    "3 4",
]


@pytest.mark.parametrize("answer", REFUSED)
def test_an_answer_of_aime_is_a_whole_number_below_1000(tmp_path: Path, answer: object) -> None:
    path = jsonl(tmp_path / "p.jsonl", [{"problem": "p", "answer": 12.0}, {"problem": "p", "answer": answer}])
    with pytest.raises(DataError, match="p.jsonl, line 2: 'answer' is "):
        read(path, DataConfig(format="aime"))
    assert [p.answer for p in read(path, DataConfig(format="aime", skip_bad_lines=True)).problems] == ["12"]


@pytest.mark.parametrize(
    ("answer", "number"),
    [
        (r"336^\circ", "336"),
        (r"$336^{\circ}$", "336"),
        ("336°", "336"),
        ("$33$", "33"),
        ("$$33$$.", "33"),
        (r"\boxed{033}", "33"),
        (r"$\boxed{33}$.", "33"),
        ("33.", "33"),
        ("000", "0"),
    ],
)
def test_an_answer_of_aime_may_be_tex_or_end_as_a_sentence_does(tmp_path: Path, answer: str, number: str) -> None:
    [problem] = read(
        jsonl(tmp_path / "p.jsonl", [{"problem": "p", "answer": answer}]), DataConfig(format="aime")
    ).problems
    assert problem.answer == number


def test_where_the_answer_of_math_is_null_the_solution_tells_it(tmp_path: Path) -> None:
    rows = [{"problem": "p", "answer": None, "solution": r"So $\boxed{7}$."}, {"problem": "p", "answer": None}]
    loaded = read(jsonl(tmp_path / "p.jsonl", rows), DataConfig(format="math", skip_bad_lines=True))
    assert ([problem.answer for problem in loaded.problems], loaded.bad) == (["7"], 1)


PUBLISHED = {
    "gsm8k": ({"question": "How many?", "answer": "2+2 = <<2+2=4>>4\n#### 1,234"}, "1,234"),
    "math": ({"problem": "Find x.", "solution": r"So $x=\boxed{\frac{1}{2}}$.", "level": "Level 5"}, r"\frac{1}{2}"),
    "aime": ({"ID": "2024-I-1", "Problem": "Find the sum.", "Answer": "033"}, "33"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_formats(tmp_path: Path, name: str) -> None:
    row, answer = PUBLISHED[name]
    [problem] = read(jsonl(tmp_path / "p.jsonl", [row]), DataConfig(format=name)).problems  # type: ignore[arg-type]
    assert problem.answer == answer


def test_gpqa_choices_are_shuffled_the_same_way_each_time(tmp_path: Path) -> None:
    wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
    rows = [{"Question": f"Q{n}", "Correct Answer": "right", **wrong} for n in range(20)]
    path = jsonl(tmp_path / "p.jsonl", rows)
    problems = read(path, DataConfig(format="gpqa")).problems
    assert problems == read(path, DataConfig(format="gpqa")).problems
    assert {problem.answer for problem in problems} == set("ABCD")
    assert all(f"({problem.answer}) right" in problem.prompt for problem in problems)


@pytest.mark.parametrize(("column", "text"), [("Question", " "), ("Correct Answer", ""), ("Incorrect Answer 1", "a")])
def test_a_row_of_gpqa_has_a_question_and_different_choices(tmp_path: Path, column: str, text: str) -> None:
    row = {"Question": "Q", "Correct Answer": "a", **{f"Incorrect Answer {n}": f"b{n}" for n in (1, 2, 3)}}
    path = jsonl(tmp_path / "p.jsonl", [row, {**row, column: text}])
    with pytest.raises(DataError, match="p.jsonl, line 2: expected a question and four different choices"):
        read(path, DataConfig(format="gpqa"))


@pytest.mark.parametrize("column", ["Question", "Correct Answer", "Incorrect Answer 2"])
def test_a_row_of_gpqa_that_lacks_a_text_is_a_bad_line(tmp_path: Path, column: str) -> None:
    row = {"Question": "Q", "Correct Answer": "a", **{f"Incorrect Answer {n}": f"b{n}" for n in (1, 2, 3)}}
    path = jsonl(tmp_path / "p.jsonl", [row, {**row, column: None}])
    with pytest.raises(DataError, match=f"p.jsonl, line 2: '{column}' is None"):
        read(path, DataConfig(format="gpqa"))
    assert read(path, DataConfig(format="gpqa", skip_bad_lines=True)).bad == 1


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        (r"So $\boxed 2$, and 5 is left.", "2"),
        (r"So $\boxed{\begin{pmatrix}1\\2\end{pmatrix}}$.", r"\begin{pmatrix}1\\2\end{pmatrix}"),
        (r"We get $\boxed{2$, and 5 is left.", None),
        (r"So \framebox{7} of 9.", None),
    ],
)
def test_a_solution_of_math_is_what_is_boxed_and_nothing_else(
    tmp_path: Path, solution: str, answer: str | None
) -> None:
    path = jsonl(
        tmp_path / "p.jsonl", [{"problem": "p", "solution": r"\boxed{1}"}, {"problem": "p", "solution": solution}]
    )
    loaded = read(path, DataConfig(format="math", skip_bad_lines=True))
    assert [problem.answer for problem in loaded.problems] == ["1"] + [answer] * (answer is not None)


def test_long_prompts_are_left_out_and_counted() -> None:
    loaded = load(DataConfig(train_size=50), held_out=False)
    kept = without_long(loaded, lambda problem: len(problem.prompt), 14)
    assert 0 < len(kept.problems) < 50 and kept.long == 50 - len(kept.problems)
    with pytest.raises(DataError, match="all 50 prompts"):
        without_long(Loaded(loaded.problems), lambda problem: 99, 14)


@pytest.mark.parametrize("name", TASKS)
def test_generated_sets_are_deterministic_and_held_out_ones_disjoint(name: str) -> None:
    train, test = generated(name, 300, False), generated(name, 60, True)
    assert train == generated(name, 300, False)
    assert len(train) > 100 and len(test) > 30
    assert not {problem for problem, _ in train} & {problem for problem, _ in test}


def test_generated_answers_are_right() -> None:
    for problem, answer in generated("arithmetic:5", 50, False):
        assert eval(problem.removeprefix("What is ").rstrip("?")) == int(answer)
    for problem, answer in generated("algebra:2", 50, False):
        left, right = problem.removeprefix("Solve for x: ").replace("x", f"*({answer})").split(" = ")
        assert eval(left) == int(right)


def test_each_pass_sees_every_problem_once_in_an_order_of_its_own() -> None:
    order = Order(10, seed=3)
    first, second = ([index for _, index in order.take(10)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(10)) and first != second


def test_the_cursor_is_the_whole_state_even_inside_a_batch_that_spans_two_passes() -> None:
    whole = Order(10, seed=3).take(40)
    order = Order(10, seed=3)
    assert order.take(8) + order.take(8) == whole[:16]
    resumed = Order(10, seed=3, cursor=order.cursor)
    assert resumed.take(24) == whole[16:]
