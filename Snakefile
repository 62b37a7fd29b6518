"""Eyrie: raw conversations and a verifier in, a served speed-up out. README.md explains it."""

from snakemake.utils import min_version

min_version("9.27")


configfile: f"{workflow.basedir}/config.yaml"


include: "rules/common.smk"
include: "rules/inputs.smk"
include: "rules/plan.smk"
include: "rules/fetch.smk"
include: "rules/shard.smk"
include: "rules/preflight.smk"
include: "rules/extract.smk"
include: "rules/vocab.smk"
include: "rules/train.smk"
include: "rules/check.smk"
include: "rules/bench.smk"
include: "rules/card.smk"
include: "rules/report.smk"


rule all:
    default_target: True
    input:
        REPORT,
