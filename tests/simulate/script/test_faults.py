"""The faults that are named in scripts that have them, and not in the same scripts without them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulate.script.faulty import CHECKPOINTED, FAULTY, HEALTHY, LATE, LOGITS, OFFLOADED, TWO, WEIGHTS, variant
from tests.simulate.script.scripts import facts, refused, simulated
from zerofit.cli.simulate_show import show
from zerofit.simulate.forecast.processes import simulate_all
from zerofit.simulate.record import RankRecord, ScriptFault
from zerofit.simulate.script.command import ScriptTarget, read_command
from zerofit.simulate.script.faults import FAULTS
from zerofit.spec.cluster import Cluster

CODES = {code: number for number, (*_, codes) in enumerate(FAULTY) for code in codes}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[ScriptFault, ...]]:
    """The faults of the faulty scripts and then of the healthy ones: all are simulated at once, by one server."""
    folder, targets, device = tmp_path_factory.mktemp("scripts"), [], Cluster("h100-80gb").device
    for number, (launcher, text) in enumerate([*((how, text) for how, text, _ in FAULTY), *HEALTHY.values()]):
        file = folder / f"train{number}.py"
        file.write_text(text)
        command = read_command([*launcher.split(), str(file)])
        ranks = int(launcher.split()[-1]) if " " in launcher else 1
        targets.append(ScriptTarget(command=command, device=device, gpus=ranks, nodes=1, host_bytes=1 << 37))
    records = simulate_all(targets, lambda text: None)
    assert [record for record in records if not isinstance(record, RankRecord)] == []
    seen = [record.script for record in records if isinstance(record, RankRecord) and record.script]
    assert not [note for script in seen for note in script.notes if "the check failed" in note.text]
    return [script.faults for script in seen]


def line_of(text: str, code: str) -> int:
    """The number of the first line that the code marks."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if line.endswith(f"#{code}"))


def test_every_fault_has_a_script():
    assert {fault.code for fault in FAULTS} == set(CODES)
    assert {code for names in HEALTHY for code in names.split()} == set(CODES)


@pytest.mark.parametrize("code", CODES)
def test_a_fault_is_named_with_its_line_and_bytes(found, code):
    _, text, codes = FAULTY[CODES[code]]
    faults = {fault.code: fault for fault in found[CODES[code]]}
    assert set(faults) == set(codes) and len(found[CODES[code]]) == len(codes)
    assert Path(faults[code].line).name.endswith(f".py:{line_of(text, code)}")
    assert codes[code] is None or faults[code].bytes == pytest.approx(codes[code], rel=0.001)


def test_padding_costs_its_share_of_the_activations(found):
    (fault,) = found[CODES["padding"]]
    assert "75% of each batch's columns" in fault.problem and fault.bytes > 16 * 384 * 8000 * 4  # the logits alone


@pytest.mark.parametrize("number", range(len(HEALTHY)))
def test_a_script_without_the_faults_gets_no_word(found, number):
    assert found[len(FAULTY) + number] == ()


def test_a_fault_that_ends_the_script_is_the_hint(folder):
    problem = refused(
        variant(CHECKPOINTED, ("self.head(", "("), (".head = ", ".none = ")).replace("nn.Linear(64, 256)", "0")
    )
    assert "does not require grad" in problem.message and "enable_input_require_grads" in problem.hint


def test_sharded_gradients_count_with_this_ranks_part(folder):
    cuda = OFFLOADED.replace("offload_policy=CPUOffloadPolicy()", "").replace('device="cpu"', 'device="cuda"')
    script = facts(simulated(variant(cuda, *LATE), f"{TWO} train.py"))
    (fault,) = [fault for fault in script.facts.faults if fault.code == "kept-gradients"]
    assert fault.bytes == WEIGHTS // 2


def test_the_answer_prints_faults(folder, capsys):
    result = simulated(LOGITS)
    (fault,) = facts(result).facts.faults
    assert result.to_dict()["run"]["faults"][0]["code"] == "fp32-logits"
    show(result, details=False)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"fault train.py:{line_of(LOGITS, 'fp32-logits')}: {fault.problem} {fault.mend}" in shown
