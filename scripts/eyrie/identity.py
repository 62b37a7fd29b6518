"""verifier.json: what the verifier is, by its source and the sha256 of each of its files."""

from pathlib import Path

from eyrie.files import read_json
from eyrie.misfit import misfit

# As `misfit` takes it.
VERIFIER = {"source": str, "files": {str: str}}


def read_identity(path: Path) -> dict:
    """The verifier's identity, as fetch.py wrote it.

    Raises:
        ValueError: naming the file, which is none.
    """
    found = read_json(path)
    if fault := misfit(found, VERIFIER):
        raise ValueError(f"{path}: {fault}: delete it, and the next run fetches the verifier anew")
    return found
