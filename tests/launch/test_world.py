"""The world that launchers give: variables as each of them sets them, and what is missing or contradicts itself."""

from __future__ import annotations

import pytest

from zerofit.launch.hostfile import Host
from zerofit.launch.world import (
    DEFAULT_PORT,
    Member,
    World,
    drop_settings,
    given_world,
    hosts_of,
    is_first,
    leave_world,
    threads_of,
    unused_nodes,
)
from zerofit.spec.errors import UserError

# printed by a process of each launcher (torch 2.14, DeepSpeed 0.19.8, accelerate 1.15, Open MPI 4.1.4, Slurm 24.11)
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
TORCHRUN |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
TORCHRUN |= {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "none"}
TORCHRUN |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
DEEPSPEED = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "1", "CROSS_SIZE": "2"}
DEEPSPEED |= {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29501"}
ACCELERATE = {
    **TORCHRUN,
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_DEEPSPEED": "true",
    "OMP_NUM_THREADS": "8",
}
OPENMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
OPENMPI |= {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_MCA_ess_base_jobid": "1231618049", "PMIX_RANK": "1"}
APART = {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}  # a host for each rank
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "9"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_NODEID": "0"}
BATCH |= {"SLURM_JOB_NODELIST": "n[08-09]", "SLURM_TASKS_PER_NODE": "2(x2)"}
STEP = {**BATCH, "SLURM_STEP_ID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2"}
STEP |= {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NODELIST": "n[08-09],m1"}
STEP |= {"PMI_RANK": "3", "PMI_SIZE": "4"}  # with --mpi=pmi2


def world_of(env) -> World:
    world = given_world(env)
    assert world
    return world


def place(env):
    world = world_of(env)
    return world.launcher, world.rank, world.size, world.local_rank, *world.master


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        (TORCHRUN, ("torchrun", 1, 2, 1, "127.0.0.1", 29500)),
        (DEEPSPEED, ("deepspeed", 3, 4, 1, "10.0.0.1", 29501)),
        (ACCELERATE, ("accelerate launch", 1, 2, 1, "127.0.0.1", 29500)),
        (OPENMPI | {"MASTER_PORT": "29502"}, ("mpirun", 1, 2, 1, "127.0.0.1", 29502)),
        (HYDRA, ("mpiexec", 1, 2, 1, "127.0.0.1", DEFAULT_PORT)),
        (STEP | {"MASTER_PORT": "29503"}, ("srun", 3, 4, 1, "n08", 29503)),
        (STEP | TORCHRUN, ("torchrun", 1, 2, 1, "127.0.0.1", 29500)),  # srun torchrun
        (STEP | OPENMPI | {"MASTER_PORT": "1"}, ("mpirun", 1, 2, 1, "127.0.0.1", 1)),  # whose daemons srun starts
        (OPENMPI | {"RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "1"}, ("mpirun", 1, 2, 1, "127.0.0.1", 1)),
        (OPENMPI | APART | {"MASTER_ADDR": "a", "MASTER_PORT": "1"}, ("mpirun", 1, 2, 0, "a", 1)),
    ],
)
def test_each_launcher_gives_a_place(env, expected):
    assert place(env) == expected
    assert not is_first(env)
    assert is_first({name: "0" if value == str(expected[1]) else value for name, value in env.items()})


def test_torchrun_s_store_and_restarts():
    world = world_of(TORCHRUN)
    assert (world.agent_store, world.attempt) == (True, 3)
    assert not world_of(DEEPSPEED).agent_store


def test_a_step_s_port_is_that_of_all_its_tasks_and_of_no_other_step():
    ports = {world_of(STEP | {"SLURM_PROCID": rank, "PMI_RANK": rank}).master[1] for rank in "0123"}
    assert len(ports) == 1
    assert ports != {world_of(STEP | {"SLURM_STEP_ID": "2"}).master[1]}


@pytest.mark.parametrize(
    "env",
    [
        {},
        BATCH,
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # srun --pty bash
        {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "LOCAL_RANK": "0"},  # for a script that srun starts
        {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "a"},  # a Kubeflow pod alone
    ],
)
def test_no_launcher_has_started_this(env):
    assert given_world(env) is None
    assert is_first(env)


@pytest.mark.parametrize("bad", [{"RANK": ""}, {"RANK": "one"}, {"RANK": "2"}])
def test_a_process_without_a_possible_rank_reports_the_error_itself(bad):
    assert is_first(TORCHRUN | bad)
    with pytest.raises(UserError):
        given_world(TORCHRUN | bad)


def test_nodes_that_would_stay_idle_are_noted():
    for env, launcher in (({**BATCH, "SLURM_JOB_NUM_NODES": "2"}, "srun"), ({"PET_NNODES": "4"}, "torchrun")):
        assert unused_nodes(env).endswith(f"start it with {launcher}")
    for env in ({}, {"SLURM_JOB_NUM_NODES": "1"}, {"PET_NNODES": "1:4"}, STEP | {"SLURM_JOB_NUM_NODES": "2"}):
        assert not unused_nodes(env)


@pytest.mark.parametrize(
    ("nodes", "first"), [("n[08-09],m1", "n08"), ("m1,n2", "m1"), ("r[1-2]n[3,5]-ib,x", "r1n3-ib"), ("one", "one")]
)
def test_the_first_node_of_a_list(nodes, first):
    assert world_of(STEP | {"SLURM_STEP_NODELIST": nodes}).master[0] == first


@pytest.mark.parametrize(
    ("env", "wheres"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, ["LOCAL_RANK"]),  # a pod of several
        ({"RANK": "1"}, ["WORLD_SIZE", "LOCAL_RANK"]),
        (TORCHRUN | {"RANK": "2"}, ["RANK"]),
        (TORCHRUN | {"RANK": "one", "LOCAL_RANK": "-1", "MASTER_PORT": "0"}, ["RANK", "LOCAL_RANK", "MASTER_PORT"]),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "3"}, ["LOCAL_WORLD_SIZE"]),
        (TORCHRUN | {"RANK": "1", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}, ["RANK", "LOCAL_RANK"]),
        (TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "many"}, ["TORCHELASTIC_RESTART_COUNT"]),
        (STEP | {"WORLD_SIZE": "8"}, ["WORLD_SIZE"]),
        (OPENMPI | {"RANK": "0", "WORLD_SIZE": "1"}, ["RANK", "WORLD_SIZE"]),
        (OPENMPI | APART, ["MASTER_ADDR"]),
    ],
)
def test_what_is_missing_or_contradicts_itself_is_told_at_once(env, wheres):
    with pytest.raises(UserError) as error:
        given_world(env)
    assert [problem.where for problem in error.value.problems] == wheres


def test_the_variables_of_a_world_are_left():
    for env in (TORCHRUN, DEEPSPEED, ACCELERATE, OPENMPI, HYDRA, STEP, STEP | OPENMPI | TORCHRUN):
        left = dict(env)
        leave_world(left)
        assert given_world(left) is None
        assert "MASTER_ADDR" not in left


def test_settings_for_other_trainings_reach_no_rank():
    for env, expected in (
        (TORCHRUN, None),
        (TORCHRUN | {"OMP_NUM_THREADS": "4"}, "4"),
        (ACCELERATE, None),
        (OPENMPI | {"OMP_NUM_THREADS": "1"}, "1"),
    ):
        left = dict(env)
        drop_settings(left)
        assert left.get("OMP_NUM_THREADS") == expected
        assert not [name for name in left if name.startswith("ACCELERATE")]


def members(*places, gpus=None, cores=((0, 1),), torch=("2",)):
    return [
        Member(
            host=host,
            local_rank=local_rank,
            cores=cores[n % len(cores)],
            gpus=gpus,
            versions={"torch": torch[n % len(torch)]},
        )
        for n, (host, local_rank) in enumerate(places)
    ]


TWO_BY_TWO = (("a", 0), ("a", 1), ("b", 0), ("b", 1))


def test_hosts_in_the_order_of_ranks():
    assert hosts_of(members(*TWO_BY_TWO), False) == (Host("a", 2), Host("b", 2))
    assert hosts_of(members(("pod", 0), ("pod", 0), ("pod", 1)), False) == (Host("pod-0", 1), Host("pod-1", 2))


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (members(("a", 0), ("b", 0), ("a", 1), ("b", 1)), "--map-by slot"),
        (members(("a", 1), ("a", 0)), "--map-by slot"),
        (members(*TWO_BY_TWO, gpus=1), "--gpus-per-node"),
        (members(*TWO_BY_TWO, torch=("2", "2", "3", "3")), "same versions"),
    ],
)
def test_hosts_that_cannot_train_together(found, word):
    with pytest.raises(UserError) as error:
        hosts_of(found, True)
    assert len(error.value.problems) >= 1 and all(word in problem.hint for problem in error.value.problems)


def test_threads_of_ranks_that_are_bound_to_cores():
    hosts = (Host("a", 2), Host("b", 2))
    assert threads_of(members(*TWO_BY_TWO), hosts) is None
    assert threads_of(members(*TWO_BY_TWO, cores=((0, 1, 2), (3, 4))), hosts) == 2


def test_a_guard_knows_its_rank():
    world = World(launcher="srun", rank=3, size=4, local_rank=1, master=("a", 1))
    assert world.place == {"RANK": "3", "LOCAL_RANK": "1"}
