"""The C++ ops of ZeRO's features are compiled before a run: those that DeepSpeed itself loads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from zerofit.launch.local import free_port
from zerofit.launch.ops import needed_ops
from zerofit.spec.model_facts import Machine

GPUS = Machine(accelerator="cuda", devices=2, cores=8, device_name="H100", fp16=True, bf16=True)
LOADED = """
import sys
import deepspeed
from deepspeed.ops import op_builder

class Builder:
    def load(self):
        print("loaded QuantizerBuilder")
        sys.exit()

op_builder.QuantizerBuilder = Builder
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
zero = {"stage": 3, sys.argv[1]: True}
deepspeed.zero.Init(config_dict_or_path={"train_batch_size": 1, "zero_optimization": zero})
"""


@pytest.mark.parametrize("key", ["zero_quantized_weights", "zero_quantized_nontrainable_weights"])
def test_the_quantizer_is_compiled_before_deepspeed_loads_it(key):
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}
    env = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    done = subprocess.run([sys.executable, "-c", LOADED, key], env=env, capture_output=True, text=True, check=True)
    assert needed_ops({"zero_optimization": {"stage": 3, key: True}}, GPUS) == ["QuantizerBuilder"]
    assert "loaded QuantizerBuilder" in done.stdout
