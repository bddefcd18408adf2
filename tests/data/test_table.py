"""Tables: which rows and columns are read, what is held out, and what is said of broken ones."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from zerofit.spec.errors import UserError

HEADER = "width,height,kind\n"


def written(path, rows, header=HEADER):
    path.write_text(header + "".join(f"{','.join(map(str, row))}\n" for row in rows))
    return f"csv:{path}"


def rows_of(count, kinds=("oak", "elm")):
    values = np.random.default_rng(0).normal(3.0, 2.0, size=(count, 2)).round(6)
    return [(a, b, kinds[n % len(kinds)]) for n, (a, b) in enumerate(values)]


def everything(data):
    parts = [split.batch(range(len(split)), range(len(split))) for split in (data.train, data.valid)]
    return parts[0]["inputs"], parts[0]["labels"], parts[1]["inputs"], parts[1]["labels"]


def test_features_are_standardized_from_the_training_part(tmp_path, opened):
    rows = rows_of(100)
    data = opened("table", data=written(tmp_path / "t.csv", rows))
    assert (data.inputs.features, data.inputs.classes) == (2, 2)
    x, y, held, kinds = everything(data)
    assert x.dtype == torch.float32 and y.dtype == torch.int64 and len(x) == 80 and len(held) == 20
    assert torch.bincount(y).tolist() == [40, 40] and torch.bincount(kinds).tolist() == [10, 10]
    torch.testing.assert_close(x.mean(0), torch.zeros(2), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(2), atol=1e-5, rtol=0)
    table = np.array([row[:2] for row in rows])  # undone, all rows are there once
    ours = torch.cat([x, held]).double().numpy()
    scale = np.polyfit(np.sort(ours[:, 0]), np.sort(table[:, 0]), 1)
    np.testing.assert_allclose(np.sort(np.polyval(scale, ours[:, 0])), np.sort(table[:, 0]), atol=1e-4)
    labels = {float(np.polyval(scale, a).round(3)): int(k) for a, k in zip(ours[:, 0], [*y, *kinds], strict=True)}
    assert all(labels[round(a, 3)] == ("elm", "oak").index(kind) for a, _, kind in rows)


def test_a_column_that_is_constant_in_the_training_part_becomes_zero(tmp_path, opened):
    rows = [(0.1, a, kind) for _, a, kind in rows_of(100)]  # the deviation of eighty times 0.1 is 1.4e-17
    x, _, held, _ = everything(opened("table", data=written(tmp_path / "t.csv", rows)))
    assert x[:, 0].abs().max() < 1e-6 and held[:, 0].abs().max() < 1e-6


def test_a_label_column_is_named_or_last_and_an_array_says_the_same(tmp_path, opened):
    rows = [(n % 3, float(n), float(n * n)) for n in range(30)]
    first = opened("table", data=written(tmp_path / "a.csv", rows, "kind,a,b\n") + ":kind")
    last = opened("table", data=written(tmp_path / "b.csv", [(a, b, k) for k, a, b in rows], header=""))
    np.save(tmp_path / "c.npy", np.array(rows))
    array = opened("table", data=f"npy:{tmp_path}/c.npy:1")
    for one in (last, array):
        for mine, theirs in zip(everything(one), everything(first), strict=True):
            assert torch.equal(mine, theirs)


def test_broken_rows_are_listed_by_line_or_left_out(tmp_path, opened, refused):
    rows = [*rows_of(20), (1, "n/a", "oak"), (1, 2), (1, "inf", "oak"), (1, 2, "")]
    name = written(tmp_path / "t.csv", rows)
    (problem,) = refused("table", data=name)
    assert problem.kind == "bad-rows" and "--skip-bad" in problem.hint
    for words in (
        "4 of 24 rows",
        "line 22: 'n/a' in 'height'",
        "line 23: 2 cells",
        "line 24: 'inf'",
        "line 25: no label",
    ):
        assert words in problem.message
    data = opened("table", data=name, skip_bad=True)
    assert len(data.train) + len(data.valid) == 20 and "4 broken rows skipped" in data.notes
    array = np.ones((10, 3))
    array[4, 1] = np.nan
    np.save(tmp_path / "t.npy", array)
    assert "line 5" in refused("table", data=f"npy:{tmp_path}/t.npy")[0].message


@pytest.mark.parametrize(
    ("rows", "header", "more", "kind", "words"),
    [
        (rows_of(20), HEADER, ":kund", "data-argument", "no column 'kund'"),
        ([(1, 2, 0.5), (1, 2, 1.5)], HEADER, "", "data-classes", "line 2: the label 0.5 is a fraction"),
        (rows_of(20, ("oak",)), HEADER, "", "data-classes", "1 class;"),
        ([(n, n, n % 2) for n in range(9)], "0,1,label\n", "", "data-classes", "FILE:label"),
        ([], "", "", "data-missing", "empty"),
        (rows_of(2), HEADER, "", "data-too-short", "2 rows"),
    ],
)
def test_tables_of_no_use(tmp_path, refused, rows, header, more, kind, words):
    (problem,) = refused("table", data=written(tmp_path / "t.csv", rows, header) + more)
    assert problem.kind == kind and words in problem.message + problem.hint


def test_other_data_and_other_models(tmp_path, refused):
    assert refused("table", data="digits")[0].kind == "data-task"
    assert refused("image", data=written(tmp_path / "t.csv", rows_of(20)))[0].kind == "data-task"
    assert refused("table", data=f"npy:{tmp_path}/none.npy")[0].kind == "data-missing"
    np.save(tmp_path / "o.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert refused("table", data=f"npy:{tmp_path}/o.npy")[0].kind == "data-missing"


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1000000000000, 3)}",  # 22 TiB
        "{'descr': '<f8', 'fortran_order': False, 'shape': (0, 1000000000000)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (-4, 3)}",
        "{'descr': '<f8', 'fortran_order': False, 'shape': (True, 3)}",
        "{'descr': '<f8', 'fortran_order': 'x', 'shape': (4, 3)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4, 3)}",
        "{'descr': [('a', '<f8')], 'fortran_order': False, 'shape': (4, 3)}",
        "(" * 500,
        "",
    ],
)
def test_a_header_that_lies_is_refused(tmp_path, refused, header):
    text = header.encode()
    path = tmp_path / "t.npy"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(96))
    assert refused("table", data=f"npy:{path}")[0].kind == "data-missing"


def test_a_table_in_fortran_order_is_the_table(tmp_path, opened):
    array = np.array(rows_of(50, kinds=(0, 1)))
    for name, order in (("c", np.ascontiguousarray(array)), ("f", np.asfortranarray(array))):
        np.save(tmp_path / f"{name}.npy", order)
    c, f = (everything(opened("table", data=f"npy:{tmp_path}/{name}.npy")) for name in "cf")
    for ours, theirs in zip(c, f, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("separator", [";", "\t", "|"])
@pytest.mark.parametrize("packed", [False, True])
def test_other_separators_and_compressed_tables_are_the_same(tmp_path, opened, separator, packed):
    rows = rows_of(30)
    wanted = everything(opened("table", data=written(tmp_path / "a.csv", rows)))
    text = (tmp_path / "a.csv").read_text().replace(",", separator)
    (tmp_path / "b.csv").write_bytes(gzip.compress(text.encode()) if packed else b"\xef\xbb\xbf" + text.encode())
    for mine, theirs in zip(everything(opened("table", data=f"csv:{tmp_path}/b.csv")), wanted, strict=True):
        assert torch.equal(mine, theirs)


def test_columns_of_words_are_named_at_once(tmp_path, refused):
    rows = [(n, "Oslo", 1.5 * n, "north", n % 2) for n in range(30)]
    name = written(tmp_path / "t.csv", rows, "a,city,b,side,kind\n")
    (problem,) = refused("table", data=name)
    assert problem.kind == "data-columns" and "'city' ('Oslo', ...), 'side' ('north', ...)" in problem.message
    assert "--skip-bad" not in problem.hint


def test_made_up_rows_are_those_of_a_10_100_10_network_and_can_be_learned(opened):
    data = opened("table", data="synthetic")
    assert (data.inputs.features, data.inputs.classes) == (10, 10)
    x, y, held, labels = everything(data)
    assert sorted(set(y.tolist())) == sorted(set(labels.tolist())) == list(range(10))
    centers = torch.stack([x[y == label].mean(0) for label in range(10)])
    nearest = torch.cdist(held, centers).argmin(dim=1)
    assert (nearest == labels).float().mean() > 0.6
    assert opened("table", data="synthetic:2").inputs.classes == 2
    with pytest.raises(UserError, match="must be 2 to"):
        opened("table", data="synthetic:²")
