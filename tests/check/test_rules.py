"""The rules' YAML: its schema, its expressions, and that one entry is a rule."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.check.corpus import cases
from zerofit.check import check as module
from zerofit.check.catalog import catalog
from zerofit.check.document import parse
from zerofit.check.rule import PLACE, Rule, rules, rules_of
from zerofit.check.rules import terms
from zerofit.check.subject import CheckSubject, TargetHardware, UnclearValue

FOLDER = Path(terms.__file__).parent
FILES = sorted(FOLDER.glob("*.yaml"))
NAMES = {"path", "value", "True", "False", "None", *terms.TERMS, *terms.FUNCTIONS}


def expressions(rule: Rule) -> list[str]:
    texts = (rule.message, rule.why, rule.fix)
    edits = [rule.edits.get("if", "True"), *rule.edits.get("set", {}).values()]
    return [rule.when, *(found for text in texts for found in PLACE.findall(text)), *edits]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_entries_follow_the_schema(file: Path):
    schema = json.loads((FOLDER / "schema.json").read_text())
    Draft202012Validator(schema).validate(yaml.safe_load(file.read_text()))
    assert set(schema["items"]["properties"]) - {"for"} == set(Rule.__dataclass_fields__)
    assert list(rules_of(file.read_text()))


def test_expressions_use_known_names_and_keys_of_deepspeed():
    for rule in rules():
        for expression in expressions(rule):
            nodes = list(ast.walk(ast.parse(expression, mode="eval")))
            unknown = {n.id for n in nodes if isinstance(n, ast.Name)} - NAMES - set(dir(CheckSubject))
            assert not unknown, (rule.code, expression)
            for call in (node for node in nodes if isinstance(node, ast.Call)):
                if getattr(call.func, "id", "") in ("get", "has", "on", "off", "number", "count", "word", "changed"):
                    for key in (a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)):
                        open_section = catalog().node(key.rpartition(".")[0]) or {}
                        known = catalog().node(key) is not None or open_section.get("additionalProperties")
                        assert known, (rule.code, key)
        assert "<" not in rule.path and not rule.code.endswith(">")


def test_every_expression_can_be_evaluated():
    """Also those after an `and` that no case of the corpus reaches: each on its own, on every configuration."""
    subjects = [
        CheckSubject(config=case.document.config, catalog=catalog(), setting=case.setting)
        for case in cases()[::8]
        if isinstance(case.document.config, dict)
    ]
    for rule in rules():
        tree = ast.parse(rule.when, mode="eval").body
        parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
        # a part may rely on those before it: `number(path) is not None and number(path) < 1`
        wholes = [" and ".join(f"({ast.unparse(p)})" for p in parts[: n + 1]) for n in range(len(parts))]
        for whole in (*wholes, f"({rule.when}) and ({rule.edits.get('if', 'True')})"):
            partly = Rule(code="x", path=rule.path, when=whole, message="", why="", source="")
            for subject in subjects:
                list(partly(subject))


def test_a_rule_is_one_entry(monkeypatch):
    entry = """
- code: accumulation-with-compile
  severity: warning
  effect: stops
  for: [{pass: z1, least: 4}, {pass: z3, least: 8}]
  path: gradient_accumulation_steps
  when: deepcompile and '<pass>' in compile_passes and number(path) >= <least> and stage > 0
  message: gradient_accumulation_steps ${value} with DeepCompile's <pass> at stage ${stage}
  why: 'DeepSpeed stops: "an example"'
  fix: use ${count(path) // 2}
  edits: {if: count(path), set: {gradient_accumulation_steps: count(path) // 2}}
  source: runtime/engine.py:1
"""
    monkeypatch.setattr(module, "rules", lambda: tuple(rules_of(entry)))
    text = (
        '{"train_micro_batch_size_per_gpu": 1,\n"gradient_accumulation_steps": 6,\n"zero_optimization": {"stage": 1},\n'
    )
    document = parse(text + '"compile": {"deepcompile": true, "passes": ["z1", "z3"]}}')
    [finding] = module.check(document, TargetHardware(reader="deepspeed"))
    assert (finding.code, finding.severity) == ("accumulation-with-compile", "warning")
    assert (finding.line, finding.effect) == (2, "stops")
    assert finding.message == "gradient_accumulation_steps 6 with DeepCompile's z1 at stage 1"
    assert finding.fix == "use 3" and finding.edits[0].value == 3  # pyright: ignore[reportAttributeAccessIssue]
    unclear = parse(document.text.replace('"stage": 1', '"stage": "one"'))
    assert {f.code for f in module.check(unclear, TargetHardware(reader="deepspeed"))} == {"not-allowed"}
    with pytest.raises(UnclearValue):
        subject = CheckSubject(config={}, catalog=catalog(), unclear=frozenset({"zero_optimization.stage"}))
        assert subject.stage


@pytest.mark.parametrize(("disk", "expected"), [("nvme0n1p3", True), ("sda2", False)])
def test_nvme_below_an_encrypted_logical_volume(tmp_path, monkeypatch, disk, expected):
    """As the kernel names them: /dev/mapper/home is a link to dm-1, which is on dm-0, which is on a partition."""
    for upper, lower in (("dm-1", "dm-0"), ("dm-0", disk)):
        (tmp_path / "block" / upper / "slaves" / lower).mkdir(parents=True)
    (tmp_path / "dm-1").touch()
    (tmp_path / "home").symlink_to("dm-1")
    monkeypatch.setattr(terms, "BLOCKS", tmp_path / "block")
    monkeypatch.setattr(terms, "device_of", lambda path: str(tmp_path / "home"))
    assert terms.is_nvme(str(tmp_path)) is expected
