"""Makes kubeflow.json: `python make.py kubeflow_trainer_api-2.3.0-*.whl kubeflow_training-1.9.4-*.whl` (from PyPI).

Both packages are of the Kubeflow authors, under the Apache License 2.0, and generated from the OpenAPI documents of
Kubeflow Trainer (TrainJob, TrainingRuntime and Kubernetes' own types) and of the Training Operator (PyTorchJob). What
is kept: names and types of fields, which are required, and that there are no others; no descriptions, no status.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import sys
import zipfile
from pathlib import Path

KINDS = {"TrainJob": "trainer.kubeflow.org/v1alpha1", "TrainingRuntime": "trainer.kubeflow.org/v1alpha1"}
OTHER = {"PyTorchJob": "kubeflow.org/v1"}
QUANTITY = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]+)?$"  # Kubernetes, Quantity
SIMPLE = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}
SHARED = {
    "V1PodTemplateSpec": "IoK8sApiCoreV1PodTemplateSpec",
    "V1ObjectMeta": "IoK8sApimachineryPkgApisMetaV1ObjectMeta",
    "Quantity": "IoK8sApimachineryPkgApiResourceQuantity",
}


def plain(schema):
    """A schema without words for people, and without the null that Python adds to optional fields."""
    if isinstance(schema, list):
        return [plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "anyOf" in schema:
        one = [s for s in schema["anyOf"] if s != {"type": "null"}]
        if len(one) == 1:
            return plain(one[0])
    return {
        key: {name: plain(one) for name, one in value.items()} if key in ("properties", "$defs") else plain(value)
        for key, value in schema.items()
        if key not in ("description", "title", "default")
    }


def of_trainer(wheel: str) -> dict:
    """Definitions by name, of pydantic's models."""
    sys.path.insert(0, wheel)
    models = importlib.import_module("kubeflow_trainer_api.models")
    found = {}
    for kind in KINDS:
        schema = plain(getattr(models, f"TrainerV1alpha1{kind}").model_json_schema(by_alias=True))
        found |= schema.pop("$defs")
        found[kind] = schema
    for name, schema in found.items():
        if schema.get("type") == "object" and "properties" in schema:
            schema["additionalProperties"] = False
        if name.endswith("ResourceQuantity"):
            found[name] = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": QUANTITY}]}
        if name.endswith("IntOrString"):
            found[name] = {"type": ["integer", "string"]}
    return found


def of_operator(wheel: str) -> dict:
    """Definitions by name, of the lists of attributes in generated classes."""
    found, wanted = {}, ["KubeflowOrgV1PyTorchJob"]
    with zipfile.ZipFile(wheel) as files:
        texts = [files.read(n).decode() for n in files.namelist() if re.search(r"/models/kubeflow_org_v1_\w+\.py$", n)]
    classes = {node.name: (node, text) for text in texts for node in ast.parse(text).body if hasattr(node, "name")}
    while wanted:
        name = wanted.pop()
        node, text = classes[name]
        known = {a.targets[0].id: ast.literal_eval(a.value) for a in node.body if isinstance(a, ast.Assign)}
        types = {known["attribute_map"][k]: t for k, t in known["openapi_types"].items() if k != "status"}
        must = [known["attribute_map"][k] for k in re.findall(r"Invalid value for `(\w+)`, must not be `None`", text)]
        wanted += [t for t in re.findall(r"KubeflowOrg\w+", " ".join(types.values())) if t not in found]
        found[name] = {"type": "object", "additionalProperties": False, "required": sorted(set(must) & set(types))}
        found[name]["properties"] = {key: of_type(one) for key, one in types.items()}
    return found | {"PyTorchJob": found.pop("KubeflowOrgV1PyTorchJob")}


def of_type(name: str) -> dict:
    """The schema of a type of the generated classes."""
    if inner := re.fullmatch(r"list\[(.*)\]", name):
        return {"type": "array", "items": of_type(inner[1])}
    if inner := re.fullmatch(r"dict\(str, (.*)\)", name):
        return {"type": "object", "additionalProperties": of_type(inner[1])}
    if name in SIMPLE:
        return {"type": SIMPLE[name]}
    if name == "object" or name.startswith("K8sIo"):
        return {}  # of elastic jobs, which are not made here
    return {"$ref": f"#/$defs/{SHARED.get(name, name)}"}


def main() -> None:
    definitions = of_trainer(sys.argv[1]) | of_operator(sys.argv[2])
    for kind, version in (KINDS | OTHER).items():
        definitions[kind]["properties"].pop("status", None)
        definitions[kind]["properties"] |= {"kind": {"const": kind}, "apiVersion": {"const": version}}
        definitions[kind]["required"] = ["apiVersion", "kind", "metadata", "spec"]
    kept, wanted = {}, [*KINDS, *OTHER]
    while wanted:
        name = wanted.pop()
        kept[name] = definitions[name]
        wanted += [n for n in re.findall(r'"#/\$defs/(\w+)"', json.dumps(definitions[name])) if n not in kept]
    source = " and ".join(Path(path).name.split("-py3")[0] for path in sys.argv[1:])
    about = f"Made by make.py from {source} of PyPI: the Kubeflow authors, Apache License 2.0"
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(kept[name], sort_keys=True)}" for name in sorted(kept))
    text = f'{{"$comment": {json.dumps(about)},\n"$defs": {{\n{lines}\n}}}}\n'
    (Path(__file__).parent / "kubeflow.json").write_text(text)


if __name__ == "__main__":
    main()
