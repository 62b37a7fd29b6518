import contextlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import tiny
from forking import python
from templates import CHATML, QWEN3_EMPTY

from eyrie.hidden import split
from eyrie.shards import read_rows
from shard import COUNTED, main

SCRIPT = Path(__file__).parents[2] / "scripts/shard.py"


def shard(inputs: Path, out: Path, conversations: Path, limit: int | None, *options: str):
    """Run scripts/shard.py in this process, which has its imports done."""
    command = [str(SCRIPT), "--conversations", str(conversations)]
    command += ["--tokenizer", str(inputs / "verifier"), "--out", str(out)]
    command += ["--limit", str(limit)] if limit else []
    command += ["--benchmark", str(inputs / "prompts.jsonl"), "--shard-size", "10"]
    command += ["--max-length", "64", "--max-new-tokens", "16", *options]
    return run(command)


def run(command: list[str]) -> SimpleNamespace:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        mock.patch("sys.argv", command),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            # As the interpreter does with a message.
            code = 1 if isinstance(end.code, str) else end.code
            print(end.code, file=sys.stderr)
    return SimpleNamespace(returncode=code, stdout=out.getvalue(), stderr=err.getvalue())


def account(out: Path) -> dict:
    """shards.json, after a look at whether it adds up."""
    found = json.loads((out / "shards.json").read_text())
    rejects = [json.loads(line) for line in (out / "rejects.jsonl").read_text().splitlines()]
    assert found["read"] == found["kept"] + found["rejected"]
    assert found["rejected"] == sum(found["reasons"].values()) == len(rejects)
    assert {type(found[name]) for name in COUNTED} == {int}
    for key in ("read", "kept", "rejected"):
        assert found[key] == sum(source[key] for source in found["sources"].values())
    shards = [read_rows(path) for path in sorted((out / "shards").glob("*"))]
    assert found["kept"] + found["rows_split_off"] == sum(map(len, shards))
    assert found["tokens"] == sum(len(rows.input_ids) for rows in shards)
    assert found["supervised_tokens"] == sum(int(rows.loss_mask.sum()) for rows in shards)
    return found | {"rejects": rejects}


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def talk(*texts: str, **more) -> dict:
    names = ("human", "gpt")
    turns = [{"from": names[i % 2], "value": text} for i, text in enumerate(texts)]
    return {"conversations": turns, **more}


DATASET = ("--answers", "dataset")


def test_a_larger_selection_begins_with_the_same_shards(inputs, tmp_path):
    for limit in (20, 25):
        done = shard(inputs, tmp_path / str(limit), inputs / "conversations.jsonl", limit)
        assert done.returncode == 0, done.stderr
    for name in ("00000.safetensors", "00001.safetensors"):
        small, large = (tmp_path / limit / "shards" / name for limit in ("20", "25"))
        assert small.read_bytes() == large.read_bytes()
    assert len(read_rows(tmp_path / "25/shards/00002.safetensors")) == 5


def test_every_row_is_accounted_for(inputs, tmp_path):
    good = [{"from": "human", "value": "the owl waits"}, {"from": "gpt", "value": "on its branch"}]
    rows = [
        {"id": 1, "conversations": good},
        {"id": 2, "conversations": good},
        {"id": 3, "conversations": []},
        {"id": 4, "conversations": [{"from": "gpt", "value": "night falls"}, *good[:1]]},
        {"id": 5, "conversations": [{"from": "human", "value": tiny.sentence(100, 8) + "?"}]},
        {"id": 6, "conversations": [{"from": "human", "value": "the <|im_end|> owl"}]},
        {"id": 7, "conversations": [{"from": "human", "value": "grass " * 100}]},
        {"id": 8, "conversations": [{"from": "human", "value": "a mouse"}]},
        "not a row",
    ]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps(rows))
    done = shard(inputs, tmp_path / "out", path, 4)
    assert done.returncode == 0, done.stderr
    found = account(tmp_path / "out")
    assert (found["read"], found["kept"], found["rejected"]) == (8, 4, 4)
    assert found["leading_answers_dropped"] == found["control_tokens_in_text"] == 1
    assert found["duplicates"] == 1
    assert found["reasons"] == {
        "duplicate": 1,
        "no turns": 1,
        "benchmark prompt": 1,
        "prompt too long": 1,
    }
    assert [reject["id"] for reject in found["rejects"]] == ["2", "3", "5", "7"]
    content = path.read_bytes()
    for reject in found["rejects"]:
        row = json.JSONDecoder().raw_decode(content[reject["offset"] :].decode())[0]
        assert str(row["id"]) == reject["id"] and rows[reject["row"]] == row


def test_too_few_rows_is_an_error_with_the_table(inputs, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"conversations": []}\n' * 3)
    done = shard(inputs, tmp_path / "out", path, 2)
    assert done.returncode == 1
    assert "2 usable conversations asked for, 0 found among 3 read" in done.stderr
    assert "no turns" in done.stderr
    assert "3  no turns" in done.stderr
    assert not (tmp_path / "out/shards.json").exists()


def test_processes_change_no_byte(inputs, tmp_path):
    rows = [talk(tiny.sentence(i), tiny.sentence(i + 1), id=i) for i in range(60)]
    rows[7] = rows[8] = {"messages": []}
    path = write(tmp_path / "rows.jsonl", *rows)
    outs = [tmp_path / n for n in ("1", "3")]
    for out in outs:
        done = shard(inputs, out, path, None, *DATASET, "--processes", out.name)
        assert done.returncode == 0, done.stderr
        account(out)
    for name in ["rejects.jsonl", *(f"shards/{i:05d}.safetensors" for i in range(6))]:
        assert (outs[0] / name).read_bytes() == (outs[1] / name).read_bytes(), name


def test_copies_under_other_ids_are_one_and_a_shared_id_is_no_matter(inputs, tmp_path):
    rows = [talk("the owl", tiny.sentence(i), id=f"{i}.{n}") for n in range(3) for i in range(10)]
    rows += [talk("a mouse", "runs over grass", id="0.0"), talk("a mouse", "waits on a branch")]
    done = shard(inputs, tmp_path / "out", write(tmp_path / "r.jsonl", *rows), None, *DATASET,
                 "--max-reject-fraction", "0.7")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = account(tmp_path / "out")
    assert (found["kept"], found["duplicates"]) == (12, 20)


def test_several_sources_each_have_an_account(inputs, tmp_path):
    write(tmp_path / "a.jsonl", talk("the owl", "sees a mouse"), {"messages": []})
    (tmp_path / "more").mkdir()
    write(tmp_path / "more/b.jsonl", {"prompt": "the owl", "response": "waits on its branch"})
    write(tmp_path / "more/c.json", talk("the owl", "sees a mouse"))
    command = (str(tmp_path / "more"), "--source-name", "first", "second")
    done = shard(inputs, tmp_path / "out", tmp_path / "a.jsonl", None, *DATASET,
                 "--conversations", str(tmp_path / "a.jsonl"), *command)  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = account(tmp_path / "out")
    assert found["sources"] == {
        "first": {"read": 2, "kept": 1, "rejected": 1, "reasons": {"no turns": 1}},
        "second": {"read": 2, "kept": 1, "rejected": 1, "reasons": {"duplicate": 1}},
    }


@pytest.mark.parametrize("keep", [False, True])
def test_a_broken_file_stops_unless_its_rows_are_wanted(inputs, tmp_path, keep):
    good = [talk("the owl", tiny.sentence(i)) for i in range(4)]
    path = tmp_path / "cut.json"
    path.write_text(json.dumps(good)[:-30])
    options = [*DATASET, "--on-bad-file", "keep"] if keep else DATASET
    done = shard(inputs, tmp_path / "out", path, None, *options)
    assert "cut.json: broken at byte" in done.stderr and "after 3 whole rows" in done.stderr
    assert done.returncode == (0 if keep else 1)
    if keep:
        (bad,) = account(tmp_path / "out")["bad_files"]
        assert (bad["file"], bad["rows"]) == (str(path), 3) and bad["offset"] > 0
    else:
        assert not (tmp_path / "out/shards.json").exists()


def test_truncation_that_leaves_no_answer_rejects(inputs, tmp_path):
    long = talk("grass " * 200, "the owl waits")
    good = [talk("the owl", tiny.sentence(i)) for i in range(9)]
    path = write(tmp_path / "rows.jsonl", long, *good)
    done = shard(inputs, tmp_path / "out", path, None, *DATASET)
    assert done.returncode == 0, done.stderr
    assert account(tmp_path / "out")["reasons"] == {"too few supervised tokens": 1}
    done = shard(inputs, tmp_path / "alone", write(tmp_path / "l.jsonl", long), None, *DATASET)
    assert done.returncode == 1 and "1  too few supervised tokens" in done.stderr


@pytest.mark.parametrize("answers", ["verifier", "dataset"])
def test_a_row_of_forty_megabytes(inputs, tmp_path, answers):
    rows = [talk("x" * (40 << 20), "yes"), talk("the owl", "x" * (40 << 20))]
    rows += [talk(f"{tiny.sentence(i)} {i}", tiny.sentence(i + 1)) for i in range(2000)]
    path = write(tmp_path / "rows.jsonl", *rows)
    command = [sys.executable, str(SCRIPT), "--conversations", str(path), "--answers", answers]
    command += ["--tokenizer", str(inputs / "verifier"), "--out", str(tmp_path / "out")]
    subprocess.run([*command, "--max-length", "64", "--max-new-tokens", "16"], check=True)
    found = account(tmp_path / "out")
    # The first has no room for its answer; the answer of the second is cut.
    reason = "prompt too long" if answers == "verifier" else "too few supervised tokens"
    assert found["reasons"][reason] == 1
    assert found["truncated"] == (answers == "dataset")
    assert found["peak_rss_bytes"] < 1.2e9


def test_rows_without_an_answer_and_a_reason_of_too_many(inputs, tmp_path):
    rows = [talk("the owl") for _ in range(20)]
    path = write(tmp_path / "rows.jsonl", *rows, *(talk("a", tiny.sentence(i)) for i in range(5)))
    done = shard(inputs, tmp_path / "out", path, None, *DATASET)
    assert done.returncode == 1
    assert "20 rows were rejected for one reason (no answer)" in done.stderr
    assert "max_reject_fraction" in done.stderr


def test_an_answer_and_a_later_question_without_one(inputs, tmp_path):
    path = write(tmp_path / "rows.jsonl", talk("the owl", "waits on a branch", "and then"))
    done = shard(inputs, tmp_path / "out", path, None, *DATASET)
    assert done.returncode == 0, done.stderr
    assert "waits on a branch<|im_end|>«" in done.stdout and "and then" not in done.stdout


@pytest.mark.parametrize("processes", ["1", "2"])
def test_answers_that_history_changes_get_rows_beside_their_conversations(
    inputs, tmp_path, processes
):
    shutil.copytree(inputs / "verifier", tmp_path / "verifier")
    (tmp_path / "verifier/chat_template.jinja").write_text(QWEN3_EMPTY)
    rows = [talk("owl", tiny.sentence(i), "mouse", "run", "and then") for i in range(13)]
    path = write(tmp_path / "rows.jsonl", *rows, rows[0], talk("the owl"))
    done = shard(tmp_path, tmp_path / "out", path, None, *DATASET, "--max-length", "256",
                 "--processes", processes, "--benchmark")  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = account(tmp_path / "out")
    assert (found["read"], found["kept"], found["rejected"]) == (15, 13, 2)
    assert (found["rows_split_off"], found["answers_not_supervised"]) == (13, 0)
    assert found["turns"] == 13 * 5
    # A shard has so many conversations, and all of their rows.
    shards = [read_rows(p) for p in sorted((tmp_path / "out/shards").iterdir())]
    assert [len(shard) for shard in shards] == [20, 6]
    for shard_rows in shards:
        ids = [row_id.numpy().tobytes() for row_id in shard_rows.row_ids]
        assert ids[::2] == ids[1::2] and len({*ids}) == len(ids) // 2
    # All on one side, even where none is held out by its hash.
    for fraction in (0.5, 0.0, 1.0):
        sides = split(shards, fraction)
        owners = [{shards[s].row_ids[i].numpy().tobytes() for s, i in side} for side in sides]
        assert all(owners) and owners[0].isdisjoint(owners[1])
        assert sum(map(len, sides)) == 26


def test_tokenised_rows_are_taken_as_they_are(inputs, tmp_path):
    rows = [
        {"input_ids": [5, 6, 7, 8, 9, 10], "loss_mask": [0, 0, 1, 1, 1, 1]},
        {"input_ids": [5, 10**6], "loss_mask": [1, 1]},
        {"input_ids": list(range(100)), "loss_mask": [1] * 100},
    ]
    path = write(tmp_path / "rows.jsonl", *rows)
    done = shard(inputs, tmp_path / "out", path, None, *DATASET)
    assert done.returncode == 0, done.stderr
    found = account(tmp_path / "out")
    assert found["reasons"] == {"token id beyond the tokenizer's vocabulary": 1}
    assert found["truncated"] == 1
    kept = read_rows(tmp_path / "out/shards/00000.safetensors")
    assert kept.row(0).tolist() == rows[0]["input_ids"] and kept.lengths == [6, 64]
    assert kept.loss_mask[:6].tolist() == [False, False, True, True, True, True]


def test_show_prints_any_row(inputs, tmp_path):
    path = write(tmp_path / "r.jsonl", *(talk("the owl", tiny.sentence(i)) for i in range(15)))
    assert shard(inputs, tmp_path / "out", path, None, *DATASET).returncode == 0
    command = [str(SCRIPT), "--tokenizer", str(inputs / "verifier")]
    command += ["--out", str(tmp_path / "out"), "--show"]
    done = run([*command, "12"])
    assert f"»{tiny.sentence(12)}<|im_end|>«" in done.stdout
    done = run([*command, "15"])
    assert done.returncode == 1 and "15 rows, numbered from 0" in done.stderr


def test_nothing_of_an_earlier_run_remains(inputs, tmp_path):
    rows = [talk("the owl", tiny.sentence(i)) for i in range(25)]
    many, few = write(tmp_path / "m.jsonl", *rows), write(tmp_path / "f.jsonl", *rows[:5])
    for path, shards in ((many, 3), (few, 1)):
        assert shard(inputs, tmp_path / "out", path, None, *DATASET).returncode == 0
        assert account(tmp_path / "out")["shards"] == shards
    done = shard(inputs, tmp_path / "out", few, 6, *DATASET)
    assert done.returncode == 1 and "5 found among 5 read" in done.stderr
    assert [path.name for path in (tmp_path / "out").rglob("*.*")] == ["rejects.jsonl"]


def test_shards_follow_template_and_length_in_the_same_folder(inputs, tmp_path):
    """None is used again for what it was not made of, and each says what it was made of."""
    shutil.copytree(inputs / "verifier", tmp_path / "verifier")
    template = tmp_path / "verifier/chat_template.jinja"
    path = write(tmp_path / "r.jsonl", talk("the owl", tiny.sentence(1, 40)))
    found = []
    for text, length in ((CHATML, "64"), ("{# other #}" + CHATML, "64"), (CHATML, "32")):
        template.write_text(text)
        done = shard(tmp_path, tmp_path / "out", path, None, *DATASET, "--max-length", length,
                     "--benchmark")  # fmt: skip
        assert done.returncode == 0, done.stderr
        (made,) = (tmp_path / "out/shards").iterdir()
        found.append((made.read_bytes(), account(tmp_path / "out")["tokenizer"]))
        assert read_rows(made).metadata["tokenizer"] == found[-1][1]
    shards, tokenizers = zip(*found, strict=True)
    assert len({*shards}) == 3
    assert tokenizers[0] != tokenizers[1] and tokenizers[0] == tokenizers[2]


@pytest.mark.parametrize("processes", ["1", "3"])
def test_a_fault_behind_the_last_row_wanted_is_no_matter(inputs, tmp_path, processes):
    """However far ahead the rows are read."""
    rows = [talk("the owl", tiny.sentence(i)) for i in range(20)]
    path = write(tmp_path / "rows.jsonl", *rows)
    path.write_text(path.read_text() + "broken")
    options = [*DATASET, "--processes", processes]
    assert shard(inputs, tmp_path / "out", path, 15, *options).returncode == 0
    assert account(tmp_path / "out")["bad_files"] == []
    done = shard(inputs, tmp_path / "out", path, 21, *options)
    assert done.returncode == 1 and "after 20 whole rows" in done.stderr
    done = shard(inputs, tmp_path / "out", path, None, *options, "--on-bad-file", "keep")
    assert done.returncode == 0 and account(tmp_path / "out")["bad_files"][0]["rows"] == 20


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("levels", [101, 450, 5000])
def test_rejects_name_the_file_among_others_of_its_name(inputs, tmp_path, processes, levels):
    """Also of rows that no process could hand to another."""
    for name in ("a", "b"):
        (tmp_path / "rows" / name).mkdir(parents=True)
        path = write(tmp_path / "rows" / name / "train.jsonl", talk("owl", f"sees a mouse {name}"))
        path.write_text(path.read_text() + '{"a":' + "[" * levels + "]" * levels + "}")
    done = shard(inputs, tmp_path / "out", tmp_path / "rows", None, *DATASET,
                 "--processes", processes)  # fmt: skip
    assert done.returncode == 0, done.stderr
    rejects = account(tmp_path / "out")["rejects"]
    names = [str(tmp_path / f"rows/{name}/train.jsonl") for name in "ab"]
    assert [reject["file"] for reject in rejects] == names
    assert {reject["reason"] for reject in rejects} == {"nested too deeply"}


@pytest.mark.parametrize("ended_by", [signal.SIGINT, signal.SIGKILL])
def test_an_end_in_the_middle_leaves_no_process_and_no_account(inputs, tmp_path, ended_by):
    """Of Ctrl-C no shard is left, either."""
    write(tmp_path / "r.jsonl", *(talk(f"the owl {i}", tiny.sentence(i)) for i in range(9000)))
    command = [str(SCRIPT), "--conversations", str(tmp_path / "r.jsonl"), "--shard-size", "10"]
    command += ["--tokenizer", str(inputs / "verifier"), "--out", str(tmp_path / "out"), *DATASET]

    def shard_in_a_group_of_its_own() -> None:
        os.setsid()
        # It is ignored where the tests themselves run in the background of a script.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run([*command, "--processes", "2"])

    process = multiprocessing.get_context("fork").Process(target=shard_in_a_group_of_its_own)
    process.start()
    while not (tmp_path / "out/shards/00001.safetensors").exists():
        assert process.is_alive()
        time.sleep(0.01)
    # As a terminal does: all of its processes get the signal.
    end = os.killpg if ended_by == signal.SIGINT else os.kill
    end(process.pid, ended_by)
    process.join()
    assert process.exitcode != 0
    for _ in range(100):
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("processes are left")
    left = [path.name for path in (tmp_path / "out").rglob("*.*")]
    assert "shards.json" not in left
    assert ended_by == signal.SIGKILL or left == []


@pytest.mark.parametrize(
    "options, message",
    [
        (["--shard-size", "0"], "0 is less than 1"),
        (["--limit", "-3"], "-3 is less than 1"),
        (["--source-name", "a", "b"], "2 --source-name for 1 --conversations"),
    ],
)
def test_options_that_cannot_be(inputs, tmp_path, options, message):
    command = [python(), str(SCRIPT), "--conversations", inputs / "conversations.jsonl"]
    command += ["--tokenizer", inputs / "verifier", "--out", tmp_path / "out", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode and message in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--tokenizer", "none"], "none: no such folder"),
        (["--tokenizer", "broken"], "broken: its tokenizer cannot be loaded (KeyError"),
        (["--tokenizer", "empty"], "empty: its tokenizer cannot be loaded ("),
        (["--template-options", "[1]"], "--template-options: [1] is no JSON object"),
        (["--template-options", "{"], "Expecting property name"),
        (["--benchmark", "none"], "none"),
        (["--benchmark", "/dev/null"], "/dev/null: no file but"),
        (["--conversations", "none"], "none: no such file"),
        (["--conversations", "/dev/zero"], "/dev/zero: no file"),
    ],
)
def test_an_argument_that_is_wrong_costs_no_shard(inputs, tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(inputs / "verifier", "broken")
    Path("broken/tokenizer.json").write_text("{}")
    Path("empty").mkdir()
    good = [Path("out/shards/00000.safetensors"), Path("out/shards.json")]
    for path in good:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("good")
    done = shard(inputs, Path("out"), inputs / "conversations.jsonl", 10, *options)
    assert done.returncode == 1 and message in done.stderr, done.stderr
    assert [path.read_text() for path in good] == ["good", "good"]


def test_a_process_that_is_killed_ends_the_job_with_an_error(inputs, tmp_path):
    """As by the kernel, where memory runs out."""
    write(tmp_path / "r.jsonl", *(talk(f"the owl {i}", tiny.sentence(i)) for i in range(9000)))
    command = [str(SCRIPT), "--conversations", str(tmp_path / "r.jsonl"), "--shard-size", "10"]
    command += ["--tokenizer", str(inputs / "verifier"), "--out", str(tmp_path / "out"), *DATASET]

    def shard_and_tell() -> None:
        done = run([*command, "--processes", "2"])
        (tmp_path / "told").write_text(f"{done.returncode} {done.stderr}")

    process = multiprocessing.get_context("fork").Process(target=shard_and_tell)
    process.start()
    while not (tmp_path / "out/shards/00001.safetensors").exists():
        assert process.is_alive()
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGKILL)
    process.join(60)
    assert process.exitcode == 0
    told = (tmp_path / "told").read_text()
    assert told.startswith("1 ") and "shard: a tokenising process was killed" in told
    assert [path.name for path in (tmp_path / "out").rglob("*.*")] == []
