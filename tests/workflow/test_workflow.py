"""The workflow from conversations to report, on a tiny verifier, through the real engine."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_job import REPORT, ROOT, SCRIPTS, check_states, jobs_of, processes_with, snakemake

from eyrie import figures
from eyrie.figures import cell_of


def test_the_account_adds_up(job):
    account = json.loads((job / "results/tiny/data/tiny/shards.json").read_text())
    rejects = (job / "results/tiny/data/tiny/rejects.jsonl").read_text().splitlines()
    assert account["read"] == account["kept"] + account["rejected"]
    assert account["kept"] == 24
    assert account["rejected"] == len(rejects) == sum(account["reasons"].values())


def test_states_are_the_verifiers(job):
    total, greedy = check_states(job / "inputs/verifier", job / "results/tiny")
    assert total > 200
    assert greedy >= 0.98 * total


def test_bytes_on_disk_are_the_states_and_little_else(job):
    summary = json.loads((job / "results/tiny/data/tiny/hidden.json").read_text())
    states = summary["tokens"] * 4 * summary["hidden_size"] * 2
    assert states < summary["bytes"] < states + summary["header_bytes"] + 40 * summary["tokens"]


def test_the_checkpoint_is_whole(job):
    folder = job / "results/tiny/ckpt_tiny"
    manifest = json.loads((folder / "manifest.json").read_text())
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["0", "1"]
    chosen = folder / str(manifest["chosen_epoch"])
    for name in ("config.json", "model.safetensors"):
        assert (folder / name).read_bytes() == (chosen / name).read_bytes()
    metrics = pd.read_parquet(folder / "metrics.parquet")
    steps = metrics[metrics.kind == "step"]
    assert steps.step.tolist() == list(range(1, len(steps) + 1))
    assert (metrics[metrics.kind == "epoch"].epoch == [0, 1]).all()
    # Of the first draft token: the first epoch looks no further ahead.
    assert steps.loss_0.iloc[-1] < steps.loss_0.iloc[0]
    vocab = load_file(job / "results/tiny/vocab_tiny.safetensors")
    assert torch.equal(load_file(folder / "model.safetensors")["d2t"], vocab["d2t"])
    assert json.loads((job / "results/tiny/check_tiny.json").read_text())["ok"]


def test_the_checkpoint_has_a_card_without_a_path_of_this_machine(job):
    folder = job / "results/tiny/ckpt_tiny"
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---")[1])
    assert head["tags"] == ["eagle3", "speculative-decoding"] and "license" not in head
    bench = json.loads((job / "results/tiny/bench_tiny.json").read_text())
    (draft,) = [m for m in bench["methods"] if m["method"] == "eagle3"]
    assert f"| eagle3 | 3 | {draft['acceptance_length']:.2f} |" in text
    # Ids that begin with 1 are others to SGLang.
    assert "vllm serve VERIFIER" in text and "SGLang does not serve it: it would take" in text
    for file in (folder / "README.md", folder / "config.json"):
        assert str(job) not in file.read_text() and "inputs/verifier" not in file.read_text()


def test_drafting_changes_no_output(job):
    """At any setting, at temperature 0."""
    bench = json.loads((job / "results/tiny/bench_tiny.json").read_text())
    assert [m["method"] for m in bench["methods"]] == ["baseline", "ngram", "eagle3"]
    assert bench["left_out"] == {"suffix": "arctic-inference is not installed"}
    for method in bench["methods"]:
        # Four prompts of two turns, each asked twice.
        assert method["identical"] == 2 * method["prompts"] == 16
    settings = {(c["draft_tokens"], c["concurrency"]) for c in bench["cells"]}
    # The last is the held-out conversations'.
    assert settings == {(0, 1), (3, 1), (1, 1), (0, 4), (3, 4), (3, 8)}
    assert all(c["faults"] == c["failed"] == c["beyond"] == 0 for c in bench["cells"])
    eagle = bench["methods"][2]
    assert eagle["drafts"] > 0 and 0 < eagle["draft_share"] < 1
    assert eagle["acceptance_length"] == pytest.approx(
        1 + eagle["accepted"] / eagle["drafts"], abs=1e-4
    )
    assert sum(eagle["acceptance_per_position"]) == pytest.approx(
        eagle["acceptance_length"] - 1, abs=1e-3
    )
    # vLLM 0.32 on a CPU verifies samples with a temperature that it never sets, so what this says
    # there is chance.
    assert [s["method"] for s in bench["sampling"]] == ["ngram", "eagle3"]
    assert all(s["samples"] == 8 and 0 <= s["p"] <= 1 for s in bench["sampling"])


def test_figures_are_those_of_the_rows(job):
    """The summary's are computed from the CSV alone, and the page shows them."""
    tree = job / "results/tiny"
    bench = json.loads((tree / "bench_tiny.json").read_text())
    rows = pd.read_csv(tree / "bench_tiny.csv", converters={"category": str}).to_dict("records")
    assert figures.cells(rows, bench["partings"], "float32") == bench["cells"]
    page = (tree / "report_tiny.html").read_text()
    for method in bench["methods"]:
        assert f"<td>{method['tokens_per_s']:,.1f}</td>" in page
    whole = [json.loads(line) for line in (tree / "bench_tiny.jsonl").read_text().splitlines()]
    assert len(whole) == len(rows)
    for row in whole:
        assert row["new_tokens"] == len(row["tokens"])
        # The engine's counters over a group are those of its requests.
        group = [r for r in whole if figures.group_of(r) == figures.group_of(row)
                 and figures.cell_of(r) == figures.cell_of(row)
                 and r["repeat"] == row["repeat"]]  # fmt: skip
        for name in ("drafts", "proposed", "accepted"):
            assert row[f"group_{name}"] == sum(r[name] for r in group)


def test_the_server_accepts_what_the_engine_did(job):
    output = snakemake(job, "results/tiny/serve_tiny.json")
    assert "through the server" in output
    served = json.loads((job / "results/tiny/serve_tiny.json").read_text())
    assert served["failed"] == 0 and served["identical"] == served["requests"] == 8
    names = ("drafts", "proposed", "accepted", "acceptance_length", "acceptance_per_position")
    assert [served[n] for n in names] == [served["in_process"][n] for n in names]
    assert served["drafts"] > 0 and not processes_with(str(job))


def test_a_run_is_compared_with_its_plan_and_tells_the_next_one(job):
    plan = json.loads((job / "results/tiny/plan_tiny.json").read_text())
    assert {row["source"] for row in plan["times"]} == {"default"} and plan["faults"] == []
    assert "Planned and measured" in (job / REPORT).read_text()
    command = [sys.executable, SCRIPTS / "plan.py", "--config", ROOT / "configs/tiny.yaml"]
    command += ["--run", "tiny", "--json", job / "next.json"]
    subprocess.run(command, cwd=job, check=True)
    following = json.loads((job / "next.json").read_text())
    assert following["tokens"]["source"] == "counted in results/tiny/data/tiny/hidden.json"
    parts = {row["part"]: row for row in following["times"]}
    assert all(row["source"].startswith("measured in ") for row in parts.values())
    lines = (job / "results/tiny/bench_tiny.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    groups = {(cell_of(r), r["repeat"], r["group"]): r["group_seconds"] for r in rows}
    served = sum(row["new_tokens"] for row in rows)
    assert parts["bench"]["rate"] == pytest.approx(served / sum(groups.values()), rel=0.01)
    manifest = json.loads((job / "results/tiny/ckpt_tiny/manifest.json").read_text())
    # The estimate of what is held out differs from what is, by some of few rows.
    assert parts["train"]["seconds"] == pytest.approx(manifest["seconds"], rel=0.4)


def test_nothing_is_to_be_done_again(job):
    assert jobs_of(snakemake(job, "-n", REPORT)) == set()


def test_nothing_is_to_be_done_again_once_the_folder_has_moved(job):
    moved = job.rename(job.with_name("moved"))
    output = snakemake(moved, "-n", REPORT)
    moved.rename(job)
    assert jobs_of(output) == set()


def test_touching_scripts_and_inputs_reruns_nothing(job, tmp_path):
    repo = copy_of_repo(tmp_path)
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == set()
    now = time.time() + 5
    for path in [*repo.rglob("*.py"), repo / "config.yaml", *(job / "inputs").glob("*.jsonl")]:
        os.utime(path, (now, now))
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == set()


def test_an_edited_source_is_fetched_again_whatever_its_time(job):
    """And one that is gone since it was fetched is not missed."""
    path = job / "inputs/conversations.jsonl"
    whole, stat = path.read_bytes(), path.stat()
    path.write_bytes(whole.replace(b"owl", b"fox", 1))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert {"fetch_conversations_0", "shard_tiny"} <= jobs_of(snakemake(job, "-n", REPORT))
    path.write_bytes(whole)
    assert jobs_of(snakemake(job, "-n", REPORT)) == set()
    path.unlink()
    assert jobs_of(snakemake(job, "-n", REPORT)) == set()
    path.write_bytes(whole)


def test_an_edit_reruns_what_uses_it(job, tmp_path):
    repo = copy_of_repo(tmp_path)
    template = repo / "templates/report.html"
    template.write_text(template.read_text() + "<!-- edited -->")
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == {"report"}
    shutil.copy(ROOT / "templates/report.html", template)
    bench = repo / "scripts/bench.py"
    bench.write_text(bench.read_text().replace("SAMPLES = 4", "SAMPLES = 3"))
    assert jobs_of(snakemake(job, "-n", REPORT, repo=repo)) == {"bench", "card", "draw", "report"}
    # A plan is made anew for any setting, and makes no other report.
    memory = "extract={max_num_seqs: 4}"
    assert jobs_of(snakemake(job, "-n", REPORT, "--config", memory)) == {"plan"}
    trained = {"plan", "train", "check", "bench", "card", "draw", "report"}
    shape = str(repo / "configs/reference/kimi_k2_eagle3.json")
    for change, jobs in {
        "train={lr: 0.5}": trained,
        "train={init_from: inputs/draft}": trained,
        "draft={sliding_window: 8}": {"preflight", *trained},
        f"draft={{reference: {shape}}}": {"preflight", *trained},
        "vocab={draft_vocab_size: 300}": {"preflight", "vocab", *trained},
        "vocab={draft_vocab_size: full}": {"preflight", "vocab", *trained},
        # Another run on the same states is none of this one's concern.
        "runs={tiny: {data: tiny}, other: {data: tiny, train: {lr: 1}}}": {"plan"},
        "bench={max_model_len: 120}": {"plan", "check", "bench", "card", "draw", "report"},
        "extract={layer_ids: [1, 2]}": {
            "preflight",
            "preflights",
            "extract_tiny",
            "vocab",
            *trained,
        },
    }.items():
        (job / "inputs/draft").mkdir(exist_ok=True)
        assert jobs_of(snakemake(job, "-n", REPORT, "--config", change)) == jobs, change


def copy_of_repo(folder: Path) -> Path:
    ignore = shutil.ignore_patterns(".*", "results", "tests", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "repo", ignore=ignore))


def test_training_and_serving_agree_on_held_out_rows(job):
    served = json.loads((job / "results/tiny/bench_tiny.json").read_text())["held_out"]
    assert served["prompts"] == 5 and served["drafts"] > 5
    assert abs(served["acceptance_length"] - served["estimated_acceptance_length"]) < 0.1


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--config", "epochs=3"], "epochs: there is no such key"),
        (["--config", "train={epoch: 3}"], "did you mean epochs"),
        (["--config", "train={epochs: many}"], "train.epochs"),
        (["--config", "vocab={draft_vocab_size: 513}"], "513 is more than the verifier's"),
        (["--config", "draft={reference: none.json}"], "none.json: cannot be read as JSON"),
        (["--config", "train={init_from: nowhere}"], "train.init_from: nowhere: no such file"),
        (["--config", "extract={layer_ids: [2, 9]}"], "layer_ids [2, 9]: give ascending ids"),
        (["results/tiny/report_2k.html"], "run '2k' is not defined: the config has"),
    ],
)
def test_mistakes_are_told_before_anything_runs(job, arguments, message):
    target = [] if arguments[0].startswith("results") else [REPORT]
    output = snakemake(job, *target, *arguments, ok=False)
    assert message in output
    assert "Traceback (most recent call last)" not in output


def test_too_few_gpus_are_told_before_the_load(job):
    target, config = "results/tiny/data/tiny/hidden.json", "extract={gpus: 2, states: fp8}"
    os.environ["CUDA_VISIBLE_DEVICES"] = "5"
    output = snakemake(job, target, "--config", config, ok=False)
    del os.environ["CUDA_VISIBLE_DEVICES"]
    assert "extract: 2 GPUs needed, 0 visible (CUDA_VISIBLE_DEVICES is 5)" in output
