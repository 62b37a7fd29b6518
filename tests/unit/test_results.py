"""Results that are damaged, of an older version or of another run are named before they are used,
whichever script reads them."""

import copy
import json

import pandas as pd
import pytest
from test_report import made_up, measurements, metrics

from eyrie import results
from eyrie.identity import read_identity
from eyrie.misfit import misfit
from eyrie.results import read_bench, read_measurements, read_result, read_training
from report import FIGURES, read_figures

SHAPES = {
    "bench": results.BENCH,
    "check": results.CHECK,
    "hidden": results.HIDDEN,
    "manifest": results.MANIFEST,
    "plan": results.PLAN,
    "shards": results.SHARDS,
    "vocab": results.VOCAB,
}


@pytest.mark.parametrize("name", SHAPES)
def test_each_key_is_asked_for_by_its_name(tmp_path, name):
    path, whole, shape = tmp_path / f"{name}.json", made_up()[name], SHAPES[name]
    path.write_text(json.dumps(whole))
    assert read_result(path, shape) == whole
    for key in shape:
        path.write_text(json.dumps({k: v for k, v in whole.items() if k != key}))
        with pytest.raises(ValueError, match=rf"{name}\.json: {key} is missing: .* makes it again"):
            read_result(path, shape)


@pytest.mark.parametrize(
    "text", ["", "[]", "5", "null", "{", "\xff", '{"seconds": NaN}', 9**5 * "["]
)
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_no_result_is_refused(tmp_path, name, text):
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ValueError, match=r"x\.json: "):
        read_result(tmp_path / "x.json", SHAPES[name])


@pytest.mark.parametrize(
    "value, shape, fault",
    [
        ({"a": [{"b": None}]}, {"a": [{"b": float}]}, "a.0.b is None, not a number"),
        ({"a": float("nan")}, {"a": float | None}, "a is nan, not a number"),
        ({"a": True}, {"a": int}, "a is True, not a whole number"),
        ({"a": 1}, {"a": bool}, "a is 1, not true or false"),
        ({"a": "1"}, {"a": [int]}, "a is 1, not a list"),
        ({"a": 1, "b": "x"}, {"a": int, str: int}, "b is 'x', not a whole number"),
        ({"a": ["d"]}, {"a": [{"b", "c"}]}, "a.0 is 'd', not one of b, c"),
        ({"a": {}}, {"a": {"b", "c"}}, "a is {}, not one of b, c"),
        ({}, {"a": object}, "a is missing"),
        ([], {}, "it is [], not an object"),
    ],
)
def test_a_misfit_is_told_with_its_place(value, shape, fault):
    assert misfit(value, shape) == fault


@pytest.mark.parametrize("value", [None, 2, 2.5])
def test_what_fits(value):
    assert misfit({"a": value, "b": None}, {"a": float | None, "b": ([int],), str: object}) is None


def changed(**keys) -> dict:
    bench = copy.deepcopy(made_up()["bench"])
    return bench | keys


@pytest.mark.parametrize(
    "bench, message",
    [
        (changed(run="another"), "is of run another, not of 1k"),
        (changed(verifier="path:other"), "measured with path:other, and the checkpoint is for"),
        (changed(fingerprint={"drafts": {"eagle3": "f00d"}}), "with other weights than"),
        (changed(methods=[]), "no figures of both baseline and eagle3"),
        (changed(methods=made_up()["bench"]["methods"][:2]), "no figures of both"),
    ],
)
def test_figures_of_something_else(tmp_path, bench, message):
    path = tmp_path / "bench_1k.json"
    path.write_text(json.dumps(bench))
    with pytest.raises(ValueError, match=rf"bench_1k\.json: .*{message}"):
        read_bench(path, made_up()["manifest"], "1k")


@pytest.mark.parametrize("kept", [0, 1, 10, -1])
def test_measurements_that_are_cut_off(tmp_path, kept):
    path, rows, bench = tmp_path / "bench_1k.csv", measurements(), made_up()["bench"]
    rows.to_csv(path, index=False)
    assert len(read_measurements(path, bench)) == len(rows)
    rows[:kept].to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"bench_1k\.csv: has \d+ rows of \w+ on mt-bench"):
        read_measurements(path, bench)


@pytest.mark.parametrize("column", ["set", "category", "accepted_3"])
def test_measurements_without_a_column(tmp_path, column):
    path = tmp_path / "bench_1k.csv"
    measurements().drop(columns=column).to_csv(path, index=False)
    with pytest.raises(ValueError, match=rf"bench_1k\.csv: has no column {column}"):
        read_measurements(path, made_up()["bench"])


@pytest.mark.parametrize(
    "change, table, message",
    [
        ({"chosen_epoch": 99}, metrics(), r"metrics\.parquet: has no epoch 99"),
        ({}, pd.DataFrame({"a": [1]}), r"metrics\.parquet: has no column kind"),
        ({"chosen_epoch": None}, metrics(), r"manifest\.json: chosen_epoch is None"),
    ],
)
def test_a_training_that_is_not_whole(tmp_path, change, table, message):
    (tmp_path / "manifest.json").write_text(json.dumps(made_up()["manifest"] | change))
    table.to_parquet(tmp_path / "metrics.parquet")
    with pytest.raises(ValueError, match=f"{message}.*delete its folder, and the next run"):
        read_training(tmp_path)


@pytest.mark.parametrize("content", [b"", b"<svg></svg>", b"\xff\xfe", None])
def test_a_figure_that_is_none_is_named(tmp_path, content):
    for name in FIGURES:
        (tmp_path / f"{name}.svg").write_text('<svg aria-label="it"></svg>')
    assert read_figures(tmp_path).keys() == FIGURES
    path = tmp_path / "loss.svg"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=r"loss\.svg: "):
        read_figures(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"source": "hf:a/b"}', '{"files": {"a": 5}}', None]
)
def test_an_identity_that_is_none_is_named(tmp_path, text):
    path = tmp_path / "verifier.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"verifier\.json: "):
        read_identity(path)
