"""What is told of a job before its engine starts: plans, and mistakes in config and input."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import tiny
from tiny_job import REPORT, ROOT, forked_snakemake, jobs_of, snakemake
from tiny_kimi import make_tiny_kimi
from transformers import GemmaConfig

SWEEP = "results/report_sweep.html"


@pytest.mark.parametrize(
    "config, message",
    [
        ("conversations={source: 'path:inputs/none.jsonl'}", "no such file"),
        (
            "conversations={source: 'path:inputs/conversations.jsonl', sha256: %s}" % ("0" * 64),
            "the config says 0000",
        ),
        ("verifier={source: 'path:inputs/bare'}", "no chat template"),
        ("verifier={source: 'path:inputs/gemma'}", "type gemma: its final norm"),
        ("verifier={source: 'hf:someone/model@main'}", "Is there a network"),
        ("data={tiny: {conversations: 4000}}", "4,000 usable conversations asked for"),
        ("draft={num_attention_heads: 6}", "FAIL an untrained draft: found draft.num_attention"),
        ("bench={prompts: 400}", "prompts, bench.prompts asks for 400"),
    ],
)
def test_bad_input_stops_before_the_engine(inputs, tmp_path, config, message):
    tiny.make_inputs(tmp_path / "inputs")
    tiny.make_verifier(tmp_path / "inputs/bare", template=None)
    tiny.make_verifier(tmp_path / "inputs/gemma", config_class=GemmaConfig)
    output = snakemake(tmp_path, REPORT, "--config", config, ok=False)
    assert message in output
    assert not list((tmp_path / "results").rglob("hidden*"))
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "config, target, total",
    [
        (
            None,
            "results/report_10k.html",
            "15 jobs left; at most 7.5 h one after the other, 0.0 GPU",
        ),
        ("llama31_8b", "results/llama31_8b/ckpt_1k", "9 jobs left; at most 11.2 h"),
        ("qwen3_8b", "results/qwen3_8b/ckpt_1k", "9 jobs left; at most 11.2 h"),
        ("tiny", "results/tiny/ckpt_tiny", "9 jobs left"),
        ("tiny_kimi", "results/tiny_kimi/ckpt_tiny", "9 jobs left"),
    ],
)
def test_dry_runs_need_nothing_but_the_config(tmp_path, inputs, config, target, total):
    # A local source is linked to, so it must be there.
    shutil.copytree(inputs, tmp_path / "inputs")
    if config == "tiny_kimi":
        shutil.rmtree(tmp_path / "inputs/verifier")
        make_tiny_kimi(tmp_path / "inputs/verifier")
    done = dry_run(tmp_path, config and ROOT / f"configs/{config}.yaml", target)
    assert {"train", "vocab", "fetch_verifier"} <= jobs_of(done)
    jobs = [line for line in done.splitlines() if line.startswith("    resources:")]
    told = ("gpu=", "disk_mb=", "mem_mb=", "runtime=")
    assert jobs and all(name in job for job in jobs for name in told)
    closing = done.strip().splitlines()[-1]
    assert closing.startswith(f"Plan: {total}") and closing.endswith(
        "make plan tells what is expected"
    )


def test_a_dry_run_of_a_verifier_that_nobody_knows_yet(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("verifier: {source: 'hf:a/b@main', sha256: null}")
    assert "Plan: 15 jobs left" in dry_run(tmp_path, config, "results/report_1k.html")


def dry_run(folder: Path, config: Path | None, target: str) -> str:
    """Its output, of a job with its own config or of the default one."""
    snakemake = Path(sys.executable).with_name("snakemake")
    command = [snakemake, "-n", "-j", "8", "-s", ROOT / "Snakefile", target]
    command += ["--configfile", config] if config else []
    code, output = forked_snakemake(folder, list(map(str, command)))
    assert code == 0, output
    return output


def plan(folder: Path, target: str, *arguments: str) -> str:
    snakemake = Path(sys.executable).with_name("snakemake")
    command = [snakemake, "-n", "-j", "8", "-s", ROOT / "Snakefile", target]
    return forked_snakemake(folder, list(map(str, [*command, *arguments])))[1]


def test_a_sweep_of_one_data_set_extracts_once(tmp_path):
    output = plan(tmp_path, SWEEP)
    counts = re.findall(r"^(extract_\w+|train|report\w*) +(\d+)$", output, re.MULTILINE)
    assert dict(counts) == {"extract_1k": "1", "train": "2", "report_sweep": "1"}


@pytest.mark.parametrize(
    "sweep, message",
    [
        ("[]", "sweep: no run is named"),
        ("[1k, 2k]", "run '2k' is not defined: the config has 10, 1k, 10k, 1k-classic"),
    ],
)
def test_a_sweep_of_no_run_is_an_error(tmp_path, sweep, message):
    output = plan(tmp_path, SWEEP, "--config", f"sweep={sweep}")
    assert message in output and ".smk" not in output and "Traceback" not in output


def test_a_run_that_is_not_defined_is_an_error_without_frames(tmp_path):
    output = plan(tmp_path, "results/report_2k.html")
    assert "run '2k' is not defined: the config has 10, 1k" in output
    assert ".smk" not in output and "Traceback" not in output


def test_rows_that_do_not_fit_together_are_refused_before_anything_runs(tmp_path):
    config = f"--configfile={ROOT / 'configs/kimi_k25.yaml'}"
    target = "results/kimi_k25/ckpt_1k"
    output = plan(tmp_path, target, config, "--config", "extract={max_num_seqs: 2000}")
    assert "max_num_seqs 2,000 x 503 tokens a row x 127,616 bytes" in output
    assert "hold 113 such rows" in output and "Plan:" not in output
    assert ".smk" not in output and "Traceback" not in output


def readme_dry_runs() -> list[str]:
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line.split("#")[0] for line in lines if line.startswith(".venv/bin/snakemake -n")]


@pytest.mark.parametrize("command", readme_dry_runs())
def test_dry_runs_that_the_readme_names_run(tmp_path, command):
    options = command.split()[1:]
    tiny.make_workflow(tmp_path)
    snakemake = Path(sys.executable).with_name("snakemake")
    code, output = forked_snakemake(tmp_path, [str(snakemake), *options])
    assert code == 0, output
    assert {"train", "vocab", "fetch_verifier"} <= jobs_of(output)
    if "kimi" in command:
        assert "gpu=8" in output
        assert "9.0 GPU-hours, 724.38 GB of disk" in output
