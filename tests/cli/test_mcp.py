"""`zerofit mcp`: the SDK's own client starts the command and calls its tools."""

from __future__ import annotations

import asyncio
import json
import os
import sys

import pytest


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What a client gets: names of tools, and the answers of some calls with their progress."""
    mcp = pytest.importorskip("mcp")  # not where it is only collected: 1.5 s of CPU time in each worker
    from mcp.client.stdio import stdio_client

    folder = tmp_path_factory.mktemp("project")
    (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimisation": {"stage": 2}}')
    program = mcp.StdioServerParameters(
        command=sys.executable, args=["-m", "zerofit", "mcp"], cwd=str(folder), env=dict(os.environ)
    )
    run = {"seq_len": 64, "micro_batch": 4, "ds_config": "zero2", "precision": "bf16"}
    calls = {
        "models": ("models", {"words": ["llama-3.1", "8b"]}),
        "check": ("check", {"ds_config": "ds.json"}),
        "fits": ("simulate", {"model": "llama-tiny", "gpu": "l4", "gpus": 2, "run": run}),
        "wrong": ("simulate", {"model": "llama-tiny", "gpu": "l5", "run": {"seqlen": 64}}),
    }

    async def ask():
        found = {}
        async with mcp.Client(stdio_client(program)) as client:
            found["tools"] = (await client.list_tools()).tools
            for key, (tool, arguments) in calls.items():
                messages = []

                async def heard(done, total, text, messages=messages):
                    messages.append(text)

                found[key] = await client.call_tool(tool, arguments, progress_callback=heard), messages
        return found

    return asyncio.run(ask())


def test_tools_describe_their_arguments(answers):
    tools = {tool.name: tool for tool in answers["tools"]}
    assert set(tools) == {"simulate", "simulate_script", "plan", "check", "explain", "models"}
    assert all(tool.description for tool in tools.values())
    assert tools["simulate"].input_schema["required"] == ["model", "gpu"]


def test_models_has_the_published_count(answers):
    result, _ = answers["models"]
    assert [(row["name"], row["parameters"]) for row in result.structured_content["models"]] == [
        ("llama-3.1-8b", 8_030_261_248)
    ]


def test_check_reads_a_file_of_the_folder(answers):
    result, _ = answers["check"]
    (problem,) = [p for p in result.structured_content["problems"] if p["path"] == "zero_optimisation"]
    assert problem["line"] == 1 and "zero_optimization" in problem["fix"]


def test_simulate_answers_as_the_command_line_does_and_reports_progress(answers):
    result, messages = answers["fits"]
    content = result.structured_content
    assert content["fits"] and sum(content["breakdown"].values()) == content["peak_bytes"]
    parameters = content["breakdown"]["parameters"] // 2  # in bf16
    # Adam's two moments in float32, half of them on each rank
    assert content["breakdown"]["optimizer state"] == pytest.approx(2 * 4 / 2 * parameters, rel=0.01)
    assert any("simulating" in message for message in messages), messages


def test_bad_input_names_every_problem(answers):
    result, _ = answers["wrong"]
    assert result.is_error
    text = result.content[0].text
    errors = json.loads(text[text.index("{") :])["errors"]
    assert {error["kind"] for error in errors} == {"unknown-gpu", "unknown-key"}
