import os
import sys
from pathlib import Path

import pytest

# Nothing in a test may look for a model on the network.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several tests run at a time; with a thread each, none waits for another's.
os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import tiny


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Path:
    """A tiny verifier, conversations.jsonl and prompts.jsonl in one folder."""
    return tiny.make_inputs(tmp_path_factory.mktemp("inputs"))
