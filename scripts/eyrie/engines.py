"""The benchmark's engines, and what was measured with them so far."""

import json
import multiprocessing
from pathlib import Path

from eyrie.bench_prompts import BenchError


class State:
    """What was measured, a line each, {key, value}, kept until the results are written."""

    def __init__(self, folder: Path):
        self.path = folder / "measured.jsonl"
        folder.mkdir(parents=True, exist_ok=True)
        self.done: dict[str, object] = {}
        text = self.path.read_text() if self.path.exists() else ""
        # A killed run may have left half a line.
        whole = text[: text.rfind("\n") + 1]
        for line in whole.splitlines():
            key, value = json.loads(line)
            self.done[key] = value
        self.path.write_text(whole)

    def put(self, key: list, value) -> None:
        self.done[json.dumps(key)] = value
        with open(self.path, "a") as file:
            file.write(json.dumps([json.dumps(key), value]) + "\n")

    def get(self, key: list, measure):
        """The value of a key, measured if it is not there yet."""
        if json.dumps(key) not in self.done:
            self.put(key, measure())
        return self.done[json.dumps(key)]


class Engines:
    """The engines, each in a process of its own so that none inherits another's memory, started
    when they are first asked; with --interleave they stay, else there is one at a time.

    They are forked from a server that has imported vLLM and done nothing else, and end with it.
    """

    def __init__(self, warm_up: list[list[int]], state: State, args):
        self.args, self.warm_up, self.state, self.running = args, warm_up, state, {}
        self.context = multiprocessing.get_context("forkserver")

    def key(self, method: dict, draft_tokens: int) -> tuple:
        # On a CPU one engine serves every number; on a GPU graphs are captured for one.
        if not self.args.gpus or method["kind"] == "baseline":
            draft_tokens = max(self.args.draft_tokens)
        return method["name"], draft_tokens

    def start(self, method: dict, draft_tokens: int) -> None:
        from eyrie.serving import work

        key = self.key(method, draft_tokens)
        if key in self.running:
            return
        if not self.args.interleave:
            self.stop()
        ours, theirs = self.context.Pipe()
        settings = (theirs, method, key[1], self.warm_up, self.args)
        process = self.context.Process(target=work, args=settings)
        process.start()
        theirs.close()
        self.running[key] = {"process": process, "pipe": ours, "ready": False}

    def start_all(self, needed: list[tuple[dict, int]]) -> None:
        """Load the engines of (method, draft tokens) at the same time. None is asked before all are
        there: it would be measured while others load."""
        for method, draft_tokens in needed:
            self.start(method, draft_tokens)
        for key in self.running:
            self.wait(key)

    def ask(self, method: dict, draft_tokens: int, name: str, *arguments):
        """What the method's engine answers to one of eyrie.serving.Serving's methods."""
        self.start(method, draft_tokens)
        return self.answer(self.key(method, draft_tokens), name, *arguments)

    def answer(self, key: tuple, name: str, *arguments):
        self.wait(key)
        return self.exchange(key, (name, arguments))

    def wait(self, key: tuple) -> None:
        if not self.running[key]["ready"]:
            self.tell(key[0], self.exchange(key))
            self.running[key]["ready"] = True

    def exchange(self, key: tuple, *messages):
        pipe, process = (self.running[key][part] for part in ("pipe", "process"))
        try:
            for message in messages:
                pipe.send(message)
            return pipe.recv()
        except (EOFError, ConnectionError):
            process.join()
            # SIGKILL is most often the kernel's, for want of memory.
            hint = " (memory? lower bench.max_num_seqs)" if process.exitcode == -9 else ""
            raise BenchError(
                f"{key[0]} ended with exit code {process.exitcode}{hint}; see above"
            ) from None

    def tell(self, name: str, about: dict) -> None:
        """Keep what an engine took: of several of one method, the most."""
        known = self.state.done.get(json.dumps(["about", name]), {})
        peaks = ("peak_rss_bytes", "peak_device_bytes")
        most = {p: max(filter(None, (about[p], known.get(p))), default=None) for p in peaks}
        self.state.put(["about", name], about | most)

    def stop(self) -> None:
        """End the engines, once each has told what it took."""
        for key in list(self.running):
            self.tell(key[0], self.answer(key, "about"))
            running = self.running.pop(key)
            running["pipe"].close()
            running["process"].join()

    def kill(self) -> None:
        for running in self.running.values():
            running["process"].kill()
