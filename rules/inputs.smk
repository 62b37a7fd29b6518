"""What rules ask of the config: their files, and settings of the run that a job is of."""


def shard_names(data):
    """The numbers of a data set's shards, known from the config alone."""
    return [f"{i:05d}" for i in range(C.shards_of(data))]


def token_shards(data, names=None):
    """The token shards of a data set, or those of these numbers."""
    names = shard_names(data) if names is None else names
    return expand(f"{R}/data/{data}/shards/{{shard}}.safetensors", shard=names)


def data_of(wildcards):
    """The data set of a run; an error that names the runs there are."""
    if wildcards.run not in C.runs:
        sys.exit(
            f"run {wildcards.run!r} is not defined: the config has {', '.join(C.runs)}. "
            "Ask for one of these, or add it under `runs:`"
        )
    return C.runs[wildcards.run].data


def hidden_of(wildcards):
    """The hidden shards that a run trains on."""
    data = data_of(wildcards)
    return expand(f"{R}/data/{data}/hidden/{{shard}}.safetensors", shard=shard_names(data))


def of_run(block, key):
    """The value of a key of vocab, draft, train or bench, for the run that a job is of."""
    return lambda wildcards: getattr(getattr(C.runs[wildcards.run], block), key)


def named(paths):
    """Files and drafts that the config names, as inputs. What one holds is a parameter, by
    `named_content`, so its time is nothing; one that a rule makes goes by its time."""
    return [local(path) if is_made(path) else ancient(local(path)) for path in dict.fromkeys(paths)]


def named_content(paths):
    """A parameter that changes with what these files and drafts hold."""
    return [held for path in paths if not is_made(path) for held in local_files.named_content(path)]


def is_made(path):
    """Whether it lies in the results."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(R))


def prompt_files():
    """Every file of prompts that a run is benchmarked on, beside the fetched one."""
    return sorted({file for run in C.runs.values() for file in run.bench.prompt_files.values()})


def halved(bound):
    """A bound of memory; each further attempt of a job, as `retries` allow them, takes half."""
    return lambda wildcards, attempt: max(1, bound >> (attempt - 1))


def content(block, identity, verifier=False):
    """A parameter that changes with what a local source holds, and not with its files' times."""
    try:
        found = local_files.local_content(block.source, Path(identity), verifier)
    except (DataError, OSError) as error:
        sys.exit(str(error))
    # A pod sees nothing of this machine.
    if block.source.startswith("path:") and not found and not workflow.remote_exec:
        sys.exit(f"{block.source}: no such file or folder, or an empty one")
    return json.dumps(found)


def asked_for(data):
    """Those runs of a data set that the targets name."""
    names = guards.asked_for(workflow, C, REPORT)
    return [run for run in names if C.runs[run].data == data]


def shards_that_fit(wildcards):
    """The shards of a data set, unless the engine has no room for their rows. A cluster's jobs find
    out on its machines."""
    if VERIFIER and (workflow.dryrun or not ON_CLUSTER) and not workflow.remote_exec:
        guards.require_fit(C, asked_for(wildcards.data))
    return token_shards(wildcards.data)


def extractions(data):
    """The extractions of a data set, each as its rule's name, its shards, its folder and what it
    waits for: one for each node, and one that links what these have put into the store."""
    names, folder = shard_names(data), f"{R}/data/{data}"
    gate, nodes = f"{folder}/preflights.json", C.nodes_of(data)
    if nodes == 1:
        return [(data, names, folder, [gate])]
    # As even as shards allow, and in one piece each, so that a node reads few files.
    ends = [len(names) * node // nodes for node in range(nodes + 1)]
    parts = [
        (f"{data}_node{i}", names[ends[i] : ends[i + 1]], f"{folder}/nodes/{data}-{i}", [gate])
        for i in range(nodes)
    ]
    return [*parts, (data, names, folder, [gate, *(f"{of}/hidden.json" for _, _, of, _ in parts)])]


def all_gpus(wildcards):
    """The GPUs of a run's training, on all of its machines."""
    train = C.runs[wildcards.run].train
    return train.gpus * train.nodes


def if_several(value):
    """A resource that only training on several machines has: `value` of their number."""

    def resource(wildcards):
        nodes = C.runs[wildcards.run].train.nodes
        return value(nodes) if nodes > 1 else None

    return resource


def init_from(run):
    """The draft that a run starts from, if there is one."""
    folder = C.runs[run].train.init_from
    return [folder] if folder else []


def preflight_of(wildcards):
    """What training waits for; an error where the checkpoint has lost a file."""
    guards.require_whole(Path(f"{R}/ckpt_{wildcards.run}"))
    return f"{R}/preflight_{wildcards.run}.json"


def bench_of(run):
    """What a run's benchmark reads of other drafts and prompts."""
    bench = C.runs[run].bench
    return [*bench.drafts.values(), *bench.prompt_files.values()]


def pairs(key):
    """A mapping of a run's benchmark as NAME=VALUE, one option each."""
    return lambda wildcards: [f"{k}={v}" for k, v in of_run("bench", key)(wildcards).items()]


def bench_flag(key):
    """A switch of a run's benchmark: the option itself, or nothing."""
    return lambda wildcards: options.flag(key.replace("_", "-"), of_run("bench", key)(wildcards))


def of_sweep(file):
    """A file of each run that the config's `sweep` names."""

    def files(wildcards):
        if not C.sweep:
            sys.exit("sweep: no run is named; list the runs to compare")
        return expand(file, run=C.sweep)

    return files
