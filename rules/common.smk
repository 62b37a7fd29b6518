"""The checked config, and what several rules ask of it."""

import json
import os
import sys
from pathlib import Path

SCRIPTS = Path(workflow.basedir) / "scripts"
sys.path.insert(0, str(SCRIPTS))

from snakemake.logging import logger
from snakemake.utils import update_config

from eyrie import guards, options, provenance
from eyrie import local as local_files
from eyrie.config import ConfigError, load_config, missing_files, read_config_file, with_reference
from eyrie.needs import SMALL_MB, Needs
from eyrie.plan import find_verifier, held_out_tokens, known_verifier
from eyrie.sources import DataError
from eyrie.totals import Totals
from eyrie.verifier import draft_size, extraction_ids

try:
    # Snakemake takes the last of what is given twice. A pod has no such file, and what has sent it
    # there has looked.
    for file in [] if workflow.remote_exec else workflow.configfiles:
        read_config_file(file)
    # A reference that a file or the command line names goes over config.yaml's own shape.
    update_config(config, with_reference(workflow.config_settings.overwrite_config))
    C = load_config(config)
    # A pod has none of these, either.
    if not workflow.remote_exec and (missing := missing_files(C)):
        raise ConfigError("config: " + "\n        ".join(missing))
    VERIFIER, IS_KNOWN = find_verifier(C), known_verifier(C) is not None
    if VERIFIER:
        extraction_ids(C.extract.layer_ids, VERIFIER.text["num_hidden_layers"])
        for settings in (C, *C.runs.values()):
            draft_size(settings.vocab.draft_vocab_size, VERIFIER.text["vocab_size"])
except (ConfigError, OSError, ValueError) as error:
    # Of an exception Snakemake would show where in this file it was raised, too.
    sys.exit(str(error))

R = C.results
REPORT = f"{R}/report_1k.html"
# What stages measure, for the next plan.
RATES = f"{R}/.state/rates.jsonl"
ENV = "../envs/cuda.yaml" if C.extract.gpus or C.train.gpus else "../envs/cpu.yaml"
NEEDS = Needs(C, VERIFIER, copies=workflow.storage_settings.default_storage_provider is not None)
TRUST = options.flag("trust-remote-code", C.verifier.trust_remote_code)

# What tells a cluster, and a dry run of anything, is the number of jobs at a time.
ON_CLUSTER = workflow.resource_settings.nodes is not None

shell.prefix(guards.shell_prefix())
guards.look_into_buckets(workflow)
# A pod's jobs are limited, and its folder is locked, where it was sent from.
if not workflow.remote_exec:
    guards.limit_gpus(workflow, C.most_gpus(), ON_CLUSTER)
    guards.free_of_locks()

    onstart:
        guards.tell_holder(ON_CLUSTER)


# A dry run ends with the sum of what its jobs need.
logger.addHandler(Totals(workflow))


wildcard_constraints:
    run="[^/]+",


def code_hash(name):
    """The hash of scripts/NAME.py and of the project modules it imports."""
    return provenance.code_hash(SCRIPTS / f"{name}.py")
