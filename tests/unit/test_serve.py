"""The check through a server, against a fake one that counts as vLLM's does."""

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import serve

METRICS = """# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.
vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0
vllm:spec_decode_num_draft_tokens_total{{engine="0",model_name="m"}} {proposed}.0
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {accepted}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {first}.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {second}.0
vllm:spec_decode_num_accepted_tokens_created{{engine="0",model_name="m"}} 1.7e+09
vllm:request_success_total{{engine="0"}} 3.0
"""


@pytest.fixture
def fake():
    """A server to which others have spoken before. Each answer takes one draft of three tokens;
    `fails` says which requests get an error."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.reply(200, METRICS.format(**server.counters).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(body)
            if server.fails(len(server.asked)):
                self.reply(500, b"{}")
                return
            accepted = server.accepted.pop(0)
            for name, count in {"drafts": 1, "proposed": 3, "accepted": accepted}.items():
                server.counters[name] += count
            server.counters["first"] += accepted >= 1
            server.counters["second"] += accepted >= 2
            self.reply(200, json.dumps({"choices": [{"token_ids": [7, 8]}]}).encode())

        def reply(self, status, body):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.counters = {"drafts": 900, "proposed": 2700, "accepted": 5, "first": 4, "second": 1}
    server.asked, server.fails = [], lambda number: False
    server.accepted = [2, 2, 2, 2, 1, 1, 1, 1, 0, 0]
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def rows(count: int) -> list[dict]:
    return [{"prompt_ids": [1, 5, n], "tokens": [7, 8]} for n in range(count)]


def test_counters_are_read_as_differences(fake):
    """10 drafts of 30 tokens, 12 accepted, whatever came before: length 2.2, rate 0.40."""
    found = serve.measure(fake.url, "m", rows(10), 16, 1)
    assert (found["drafts"], found["proposed"], found["accepted"]) == (10, 30, 12)
    assert (found["acceptance_length"], found["acceptance_rate"]) == (2.2, 0.4)
    assert found["acceptance_per_position"] == [0.8, 0.4]
    assert (found["requests"], found["failed"], found["identical"]) == (10, 0, 10)


def test_the_server_is_given_tokens(fake):
    """Those of the benchmark: it can put no second BOS before them."""
    serve.measure(fake.url, "m", rows(3), 16, 2)
    assert sorted(body["prompt"] for body in fake.asked) == [[1, 5, n] for n in range(3)]
    assert all(body["temperature"] == 0 and body["max_tokens"] == 16 for body in fake.asked)


def test_failed_requests_are_counted_apart(fake):
    """Three in ten fail: the others' drafts are what counts."""
    fake.fails = lambda number: number in (2, 5, 9)
    found = serve.measure(fake.url, "m", rows(10), 16, 1)
    assert (found["failed"], found["identical"], found["drafts"]) == (3, 7, 7)
    assert found["acceptance_length"] == round(1 + 11 / 7, 4)


def test_nothing_drafted_is_no_acceptance(fake):
    fake.fails = lambda number: True
    found = serve.measure(fake.url, "m", rows(2), 16, 1)
    assert found["acceptance_length"] is None and found["failed"] == 2


CHILD = "import subprocess, sys, time; subprocess.Popen(['sleep', '300']); time.sleep(300)"
KEEPING = """
import sys, time
from pathlib import Path
import serve
with serve.server([sys.executable, "-c", {child!r}], Path(sys.argv[1]) / "log") as process:
    (Path(sys.argv[1]) / "group").write_text(str(process.pid))
    time.sleep(float(sys.argv[2]))
    raise KeyError("as anything may")
"""


def group(number: int) -> set[str]:
    """The processes of a group that are not yet dead."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(of) == number and state != "Z":
            found.add(stat.parent.name)
    return found


@pytest.mark.parametrize("killed", [True, False])
def test_no_process_is_left_whatever_happens(tmp_path, killed):
    """The server's child, too, which the server's own end would not end."""
    code = KEEPING.format(child=CHILD)
    scripts = Path(serve.__file__).parent
    command = [sys.executable, "-c", code, str(tmp_path), "300" if killed else "2"]
    process = subprocess.Popen(command, cwd=scripts, stderr=subprocess.DEVNULL)
    file, deadline = tmp_path / "group", time.time() + 60
    while not (file.exists() and file.read_text() and len(group(int(file.read_text()))) > 1):
        assert time.time() < deadline
        time.sleep(0.05)
    if killed:
        process.kill()
    process.wait()
    while left := group(int(file.read_text())):
        assert time.time() < deadline, left
        time.sleep(0.05)


DRAFT = {"set": "mt", "method": "eagle3", "draft_tokens": 3, "concurrency": 1}


@pytest.mark.parametrize(
    "lines, message",
    [
        ([], "has 0 rows of the draft, and its figures are of 2"),
        (["{"], "line 1: "),
        (["[]"], "line 1: it is .*, not an object"),
        ([json.dumps(DRAFT)], "line 1: repeat is missing"),
    ],
)
def test_rows_that_are_not_the_benchmarks(tmp_path, lines, message):
    path = tmp_path / "bench_1k.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=rf"bench_1k\.jsonl: {message}"):
        serve.read_rows(path, DRAFT | {"prompts": 2})


def test_rows_of_the_draft_are_asked_again(tmp_path):
    path, row = tmp_path / "bench_1k.jsonl", {"prompt_ids": [1], "tokens": [2], "beyond": False}
    for name in ("drafts", "proposed", "accepted"):
        row |= {name: 1} | {f"{name}_{k}": 1 for k in range(1, DRAFT["draft_tokens"] + 1)}
    rows = [DRAFT | row | {"repeat": repeat} for repeat in (0, 1)]
    rows += [row | {"method": "baseline"} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert serve.read_rows(path, DRAFT | {"prompts": 1}) == rows[:1]
    del rows[0]["accepted_1"]
    path.write_text(json.dumps(rows[0]))
    with pytest.raises(ValueError, match="line 1: accepted_1 is missing"):
        serve.read_rows(path, DRAFT | {"prompts": 1})
