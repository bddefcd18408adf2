"""The examples run, and their pages show what the commands print (test_docs_commands.py reads the commands)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import zerofit as zf
from tests.test_docs_zh import ROOT
from zerofit.launch.local import free_port

EXAMPLES = ROOT / "examples"
FOLDERS = sorted(path for path in EXAMPLES.iterdir() if path.is_dir())
ENVIRONMENT = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def ran(*command: str, folder: Path, typed: str = "", code: int = 0) -> str:
    """Return what a command prints to standard output."""
    done = subprocess.run(command, cwd=folder, env=ENVIRONMENT, input=typed, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_each_is_a_screen_and_in_the_table(folder):
    assert f"]({folder.name}/" in (EXAMPLES / "README.md").read_text()
    page = folder / "README.md"
    if page.exists():
        lines = [line for line in page.read_text().splitlines() if line]
        assert len(lines) <= 45
    else:
        assert list(folder.glob("*.ipynb"))


def test_run_files_and_configurations_are_right(monkeypatch):
    for file in EXAMPLES.rglob("run.yaml"):
        run = zf.Run.load(file)
        if run.ds_config == "ds_config.json":
            checked = zf.check(file.with_name("ds_config.json"), cluster=zf.Cluster("h100-80gb", gpus=8, nodes=4))
            assert not checked.errors and run.ranks == 32
    checked = zf.check(EXAMPLES / "hf-trainer" / "zero3.json")
    assert not checked.errors and checked.reader.name == "trainer"


def test_the_cure_is_that_of_the_page():
    """The page's diff applies to the script, whose arguments then are those that the page names."""
    folder = EXAMPLES / "hf-trainer"
    script, page = (folder / "train.py").read_text(), (folder / "README.md").read_text()
    added = [line[1:].strip() for line in page.splitlines() if line.startswith("+")]
    assert added == ["gradient_checkpointing=True,", 'deepspeed="zero3.json",']
    assert not any(line in script for line in added)
    assert all(line.strip() in script for line in ("args = TrainingArguments(", 'output_dir="out",', "bf16=True,"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the small model and its chats have been made."""
    folder = tmp_path_factory.mktemp("small")
    ran(sys.executable, str(EXAMPLES / "lora-7b" / "small.py"), folder=folder)
    return folder


@pytest.mark.slow
def test_the_small_model_sees_its_chats(small):
    options = {"tokenizer": str(small / "small"), "chat_template": Path("zephyr"), "seq_len": 64}
    (sample,) = zf.look_at_data(small / "chats.jsonl", show=1, **options).samples
    read, learned, *_ = sample.documents[0]
    assert read.text.startswith("<|user|>\n") and read.text.endswith("?</s>\n<|assistant|>\n")
    assert learned.learned and learned.text.startswith("It is ") and learned.text.endswith(".</s>")


@pytest.mark.slow
def test_the_small_path(small):
    """The commands of the page, from the small model to a chat with the merged one, with fewer steps."""
    page = (EXAMPLES / "lora-7b" / "README.md").read_text().partition("## The same steps")[2]
    first, *commands = page.partition("```bash\n")[2].partition("```")[0].splitlines()
    assert first == "python small.py" and len(commands) == 4 and "--steps 60 " in commands[1]
    for command in commands:
        ran("bash", "-c", command.replace("--steps 60 ", "--steps 4 "), folder=small)
    assert (small / "merged" / "chat_template.jinja").is_file()


@pytest.mark.slow
def test_two_hosts_on_one_machine(tmp_path):
    """The example's own files, with a tenth of its steps: they are as many as one needs to kill a rank by hand."""
    fewer = {"steps: 600": "steps: 60", "save_every: 50": "save_every: 15", "step-00000050": "step-00000015"}
    fewer["--nodes 2"] = f"--nodes 2 --master-port {free_port()}"  # other tests use the default port meanwhile
    for name in ("run.yaml", "try.sh"):
        text = (EXAMPLES / "two-hosts-one-machine" / name).read_text()
        for old, new in fewer.items():
            text = text.replace(old, new)
        (tmp_path / name).write_text(text)
    said = ran("bash", "try.sh", folder=tmp_path)
    assert "== exit code 3 ==" in said
    result = json.loads((tmp_path / "runs" / "two" / "result.json").read_text())
    assert result["steps"] == 60 and int(result["resumed_from"][-8:]) >= 15
    assert (tmp_path / "exported" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("folder", "command", "code", "shown"),
    [
        ("hf-trainer", "simulate --gpus 4 --gpu a100-40gb --no-knobs -- torchrun train.py", 1, "DOES NOT FIT"),
        (
            "llama-70b-4-nodes",
            "plan llama-3.1-70b --nodes 4 --gpus 8 --gpu h100-80gb --seq-len 4096 --global-batch 256",
            0,
            "FITS",
        ),
    ],
)
def test_shown_verdicts_are_those_of_today(folder, command, code, shown):
    page = (EXAMPLES / folder / "README.md").read_text()
    lines = ran("zerofit", *command.split(), folder=EXAMPLES / folder, code=code).splitlines()
    (verdict,) = [line for line in lines if line.startswith(shown)]
    assert verdict in page.splitlines()
    assert not [line for line in lines if "a second copy of the weights" in line]  # DDP's buckets have their sizes


@pytest.mark.slow
def test_the_notebook_runs(tmp_path):
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    book = nbformat.read(EXAMPLES / "notebook" / "zerofit.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells)
    nbclient.NotebookClient(book, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
