"""The mesh of ranks against DeepSpeed's own topology of pipelines."""

from __future__ import annotations

from itertools import chain

import pytest
from deepspeed.pipe import DualPipeVModule, PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.utils import groups

from zerofit.spec.mesh import (
    coords_of,
    describe_rank,
    expert_rank,
    expert_ranks,
    first_of_stages,
    mesh_table,
    parts_of_stage,
    pipeline_parts,
    ranks_along,
)
from zerofit.spec.run_folder import Layout

LAYOUTS = [Layout(dp=3), Layout(dp=2, tp=4), Layout(dp=2, pp=3, sp=2), Layout(dp=1, tp=2, pp=2, sp=3)]
LAYOUTS += [Layout(dp=3, tp=2, pp=2, sp=2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_ranks_are_where_deepspeeds_pipelines_have_them(layout):
    topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp * layout.sp)
    for rank in range(layout.world_size):
        coords, theirs = coords_of(rank, layout), topology.get_coord(rank)
        assert (coords.pp_rank, coords.tp_rank) == (theirs.pipe, theirs.model)
        assert (coords.dp_rank, coords.sp_rank) == divmod(theirs.data, layout.sp)
    assert ranks_along(layout, "tp") == topology.get_axis_comm_lists("model")
    assert sorted(ranks_along(layout, "dp", "sp")) == sorted(topology.get_axis_comm_lists("data"))
    assert first_of_stages(layout) == sorted(topology.filter_match(data=0, model=0))


@pytest.mark.parametrize("stages", [2, 3, 5])
def test_parts_of_the_layers_are_where_dualpipev_has_them(stages, monkeypatch):
    monkeypatch.setattr(PipelineModule, "_partition_layers", lambda self, method: None)
    for stage in range(stages):
        module = DualPipeVModule.__new__(DualPipeVModule)
        vars(module).update(num_stages=stages, stage_id=stage, parts=range(2 * stages + 1), _num_layers=2 * stages)
        vars(module).update(_local_start=stage, _local_stop=stage + 1)
        module._partition_layers()
        own = parts_of_stage(stage, stages, "dualpipev")
        assert [(part, part + 1) for part in own] == module.phase_bounds
        assert {module.stage_owner(part) for part in own} == {stage}
        assert parts_of_stage(stage, stages, "1f1b") == (stage,)
    assert pipeline_parts(stages, "dualpipev") == module.num_stages


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("axis", ["pp", "dp", "sp", "tp"])
def test_a_group_differs_along_its_axis_alone(layout, axis):
    groups = ranks_along(layout, axis)
    assert sorted(chain(*groups)) == list(range(layout.world_size))
    for group in groups:
        places = [coords_of(rank, layout) for rank in group]
        assert [getattr(place, f"{axis}_rank") for place in places] == list(range(getattr(layout, axis)))
        others = {"pp", "dp", "sp", "tp"} - {axis}
        assert len({tuple(getattr(place, f"{other}_rank") for other in sorted(others)) for place in places}) == 1


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=2), Layout(dp=2, sp=2, ep=4), Layout(dp=4, sp=2, ep=2)], ids=str)
def test_experts_are_where_deepspeeds_groups_have_them(layout, monkeypatch):
    """The groups that DeepSpeed makes, on each rank in turn."""
    made: list[list[int]] = []
    monkeypatch.setattr(groups.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(groups.dist, "get_world_size", lambda: layout.world_size)
    monkeypatch.setattr(groups.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(groups.dist, "new_group", lambda ranks: made.append(list(ranks)))
    monkeypatch.setattr(groups, "_EXPERT_PARALLEL_GROUP", {})
    monkeypatch.setattr(groups, "_EXPERT_DATA_PARALLEL_GROUP", {})
    groups._create_expert_and_data_parallel(layout.ep, pp_size=1)
    together, alike = expert_ranks(layout)
    assert sorted(made) == sorted([*alike, *together])
    assert [expert_rank(rank, layout) for rank in together[0]] == list(range(layout.ep))


def test_the_picture_is_that_of_the_documentation():
    rows = mesh_table(Layout(dp=2, tp=2, pp=2, sp=2))
    assert rows[0] == ["", *(f"data {d}, sequence {s}" for d in (0, 1) for s in (0, 1))]
    assert rows[1:] == [["stage 0", "0-1", "2-3", "4-5", "6-7"], ["stage 1", "8-9", "10-11", "12-13", "14-15"]]
    assert mesh_table(Layout(dp=2)) == [["", "data 0", "data 1"], ["", "0", "1"]]
    assert mesh_table(Layout(dp=1, tp=2)) == [["", "ranks"], ["", "0-1"]]


def test_the_picture_of_a_large_mesh_leaves_its_middle_out():
    rows = mesh_table(Layout(dp=16, tp=8, pp=16))
    assert len(rows) == 11 and {len(row) for row in rows if row != ["..."]} == {11}
    assert (rows[1][1], rows[-1][-1]) == ("0-7", "2040-2047")
    assert rows[-2] == ["..."] and rows[1][-2] == "..."


def test_a_rank_is_described_along_what_is_divided():
    assert describe_rank(5, Layout(dp=4, sp=2, ep=4)) == "data 2, sequence 1, experts 1"
    assert describe_rank(13, Layout(dp=2, tp=2, pp=2, sp=2)) == "stage 1, data 1, sequence 0, tensor 1"
    assert describe_rank(3, Layout(dp=1, tp=2, pp=2)) == "stage 1, tensor 1"
    assert describe_rank(0, Layout(dp=1)) == ""
