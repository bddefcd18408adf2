"""Whatever stands in the file: a verdict and a message, never a traceback."""

from __future__ import annotations

import json

from click.testing import CliRunner
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zerofit.check.catalog import catalog
from zerofit.check.check import check, mend
from zerofit.check.document import parse
from zerofit.check.explain import explain
from zerofit.check.migrate import migrate
from zerofit.check.scan import SyntaxFault
from zerofit.check.subject import TargetHardware
from zerofit.cli.main import main
from zerofit.config.ds_json import bundled
from zerofit.spec.model_facts import ModelFacts

FACTS = ModelFacts(
    task="causal-lm", parameters=1000, largest_parameter=400, hidden_size=20, forward_flops=1, attention_heads=4
)
SETTINGS = [TargetHardware(), TargetHardware(ranks=4, pipeline=2, accelerator="cpu", precisions=("fp32",), facts=FACTS)]
TEXTS = [path.read_text() for path in bundled().values()]


def all_paths(node: dict, prefix: str = "") -> list[str]:
    found = []
    for key, child in node.get("properties", {}).items():
        found += [prefix + key, *all_paths(child, f"{prefix}{key}.")]
    return found


PATHS = all_paths(catalog().schema)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 10**12),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["auto", "cpu", "nvme", "none", "3", "1e-3", "true", "AdamW", "sgd", "WarmupLR", "fp32", "", "é"]),
    st.text(max_size=5),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@st.composite
def configs(draw: st.DrawFn) -> str:
    """A bundled file with some keys set to anything, some renamed, and now and then a broken text."""
    config = json.loads(draw(st.sampled_from(TEXTS)))
    for path in draw(st.lists(st.sampled_from(PATHS), max_size=6)):
        *parents, last = path.split(".")
        node = config
        for key in parents:
            if not isinstance(node.get(key), dict):
                node[key] = {}
            node = node[key]
        node[last + draw(st.sampled_from(["", "", "", "s", "_"]))] = draw(VALUES)
    text = json.dumps(config, indent=draw(st.sampled_from([None, 2])))
    if draw(st.integers(0, 9)) == 0:
        cut = draw(st.integers(0, len(text)))
        text = text[:cut] + draw(st.sampled_from(["", ",", '"', "//", "}"])) + text[cut + 1 :]
    return text


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(configs(), st.sampled_from(SETTINGS))
def test_nothing_crashes_the_checker(text, setting):
    try:
        document = parse(text)
    except SyntaxFault as fault:
        assert fault.line >= 1 and fault.column >= 1 and fault.message
        return
    findings = check(document, setting)
    lines = text.count("\n") + 1
    for finding in findings:
        assert finding.message and finding.why and finding.fix
        assert 1 <= finding.line <= lines and finding.column >= 1
        assert "{value}" not in finding.message + finding.why + finding.fix
        json.dumps(finding.as_dict())
    parse(mend(document, setting))
    if isinstance(document.config, dict):
        assert explain(document, findings, setting)
        parse(migrate(document, setting).text)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(configs())
def test_nothing_crashes_the_command(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("mutated") / "ds.json"
    path.write_text(text)
    for flags in ([], ["--json"], ["--explain", "--fix"]):
        done = CliRunner().invoke(main, ["check", str(path), *flags])
        assert done.exit_code in (0, 2), done.output
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exc_info
        assert "Traceback" not in done.output
