"""What stops a stage, in one line."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def in_one_line(stage: str) -> Iterator[None]:
    """End with one line where the system refuses a file (a full disk, one that may not be written)
    or the user stops; of anything else the traceback is wanted."""
    try:
        yield
    except OSError as error:
        sys.exit(f"{stage}: {error}")
    except KeyboardInterrupt:
        print(f"{stage}: stopped", file=sys.stderr)
        sys.exit(130)  # as a shell has it of SIGINT
