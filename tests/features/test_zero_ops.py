"""The C++ ops of ZeRO's features are compiled before a run: those that DeepSpeed itself loads."""

from __future__ import annotations

import os
import subprocess
import sys

from zerofit.launch.local import free_port
from zerofit.launch.ops import needed_ops
from zerofit.spec.model_facts import Machine

GPUS = Machine(accelerator="cuda", devices=2, cores=8, device_name="H100", fp16=True, bf16=True)
LOADED = """
import os, sys
import deepspeed
from deepspeed.ops import op_builder

class Builder:
    def load(self):
        print("loaded QuantizerBuilder", flush=True)
        os._exit(0)

op_builder.QuantizerBuilder = Builder
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
for key, port in zip(sys.argv[1::2], sys.argv[2::2]):
    if not os.fork():
        os.environ["MASTER_PORT"] = port
        deepspeed.init_distributed("gloo")
        zero = {"stage": 3, key: True}
        deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": zero})
        os._exit(1)
    os.wait()
"""
KEYS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


def test_the_quantizer_is_compiled_before_deepspeed_loads_it():
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    words = [word for key in KEYS for word in (key, str(free_port()))]
    command = [sys.executable, "-c", LOADED, *words]
    done = subprocess.run(command, env={**os.environ, **place}, capture_output=True, text=True, check=True)
    assert done.stdout.count("loaded QuantizerBuilder") == len(KEYS), done.stderr
    for key in KEYS:
        assert needed_ops({"zero_optimization": {"stage": 3, key: True}}, GPUS) == ["QuantizerBuilder"]
