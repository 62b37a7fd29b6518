"""The workflow with its results in a bucket, on moto's server; and the profile for pods."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from forking import python
from tiny_job import REPORT, jobs_of, snakemake

boto3, server, *_ = (
    pytest.importorskip(name, reason="needs envs/s3.txt", exc_type=ImportError)
    for name in (
        "boto3",
        "moto.server",
        "snakemake_storage_plugin_s3",
        "snakemake_executor_plugin_kubernetes",
    )
)

TREE = "some/where/results/tiny"
STORAGE = ["--default-storage-prefix", "s3://eyrie/some/where"]
S3 = ["--default-storage-provider", "s3", *STORAGE]

# Asks for a folder before and after another machine has uploaded it.
SNAKEFILE = """
configfile: "config.yaml"

include: "rules/common.smk"
include: "rules/inputs.smk"

folder = workflow.storage_registry.default_storage_provider.object("s3://eyrie/folder")
before = folder.exists()
folder.s3obj("file").put(Body=b"uploaded")
print("folder:", before, folder.exists())

rule all:
    default_target: True
"""


@pytest.fixture(scope="module")
def bucket():
    """An empty bucket of a server on 127.0.0.1, which Snakemake finds through its environment."""
    moto = server.ThreadedMotoServer("127.0.0.1", 0)
    moto.start()
    host, port = moto.get_host_and_port()
    access = {"endpoint_url": f"http://{host}:{port}", "access_key": "a", "secret_key": "b"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in access.items():
            environment.setenv(f"SNAKEMAKE_STORAGE_S3_{name.upper()}", value)
        s3 = boto3.resource(
            "s3",
            endpoint_url=access["endpoint_url"],
            region_name="us-east-1",
            aws_access_key_id=access["access_key"],
            aws_secret_access_key=access["secret_key"],
        )
        s3.Bucket("eyrie").create()
        yield s3.Bucket("eyrie")
    moto.stop()


def run(folder: Path, *options: str) -> str:
    """Snakemake in a folder that has a workflow; what it printed."""
    command = [python(), Path(sys.executable).with_name("snakemake"), *options]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_what_one_folder_makes_another_takes_from_the_bucket(bucket, finished, inputs, tmp_path):
    """The first has the states and the training of a finished job, so no engine is loaded."""
    made, taken = tmp_path / "made", tmp_path / "taken"
    for folder in (made, taken):
        folder.mkdir()
        (folder / "inputs").symlink_to(inputs)
    shutil.copytree(finished / "results/tiny/.state", made / "results/tiny/.state")
    snakemake(made, *S3, "results/tiny/ckpt_tiny")
    # Nothing of the results is left in the folder but what is the machine's own.
    assert sorted(p.name for p in (made / "results/tiny").iterdir()) == [".state", "logs"]
    assert [p.name for p in (made / "results/tiny/logs").iterdir()] == ["tensorboard"]
    assert not list((made / ".snakemake/storage").rglob("*.safetensors"))

    stored = {o.key.removeprefix(f"{TREE}/"): o.Object() for o in bucket.objects.all()}
    assert "data/tiny/preflights.json" not in stored and "logs/train_tiny.jsonl" in stored
    there = finished / "results/tiny"
    same = [*there.glob("data/tiny/*/*.safetensors"), *there.glob("ckpt_tiny/**/model.safetensors")]
    assert len(same) == 9
    for path in same:
        content = stored[str(path.relative_to(there))].get()["Body"].read()
        assert content == path.read_bytes(), path
    # A bucket has no links: what the verifier's would lead to is there.
    assert stored["verifier/model.safetensors"].content_length > 10**6
    summary = json.loads(stored["data/tiny/hidden.json"].get()["Body"].read())
    assert summary["made"] == 0

    # What another machine measured.
    for name in ("plan_tiny.json", "check_tiny.json", "bench_tiny.json", "bench_tiny.csv",
                 "bench_tiny.jsonl", "card_tiny.md"):  # fmt: skip
        bucket.upload_file(str(there / name), f"{TREE}/{name}")
    assert jobs_of(snakemake(taken, *S3, REPORT)) == {"draw", "report"}
    page = bucket.Object(f"some/where/{REPORT}").get()["Body"].read()
    assert b"acceptance length" in page
    assert jobs_of(snakemake(made, *S3, "-n", REPORT)) == set()


def test_a_folder_that_a_pod_uploads_is_seen(bucket, tmp_path):
    """The plugin itself remembers that it was not there."""
    output = run(tiny.make_workflow(tmp_path, SNAKEFILE), "-n", *S3)
    assert "folder: False True" in output


def test_the_profile_for_pods_plans_a_job_on_gpus(bucket, tmp_path):
    tiny.make_workflow(tmp_path)
    options = ["--workflow-profile", "profiles/kubernetes", *STORAGE]
    options += ["--configfile=configs/kimi_k25.yaml"]
    output = run(tmp_path, "-n", *options, "results/kimi_k25/ckpt_1k")
    (extraction,) = re.findall(r"^rule extract_1k:(.*?)^$", output, re.MULTILINE | re.DOTALL)
    # What the plugin asks of a job with GPUs, and takes them as limits by.
    assert "gpu=8" in extraction and "gpu_manufacturer=nvidia, scale=0" in extraction
    # A pod has a copy of the verifier, of 547 GB, beside the states.
    (disk,) = re.findall(r"disk_mb=(\d+)", extraction)
    assert int(disk) > 547_000
