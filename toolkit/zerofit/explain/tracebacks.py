"""Read the traceback before an error message: the user's line, and the training phase."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from zerofit.explain.log import TRACEBACK, LogLine

LOOKED_BACK = 400  # lines; a traceback through a large model and DeepSpeed has some 120

LOADING, INIT, FORWARD, LOSS, BACKWARD, STEP = "loading", "init", "forward", "loss", "backward", "step"
EVALUATION, KEPT_LOGITS, GENERATION, SAVING, DATA = "evaluation", "kept logits", "generation", "saving", "data"

CODE_LINE = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>.+))?')
ERROR_LINE = re.compile(r"[\w.]*(?:Error|Exception)\b")
_NOTEBOOK = re.compile(
    r"^\s*(?:File )?(?P<file>(?:~|/|\w:|<ipython|Cell )[^:(]*?)(?::(?P<line>\d+))?,? in (?P<name>.+)$"
)
_CELL = re.compile(r"^(?P<file>Cell In ?\[\d+\]), line (?P<line>\d+)(?:, in (?P<name>.+))?$")
_RICH = re.compile(r"^[│|]\s*(?P<file>\S+\.py):(?P<line>\d+) in (?P<name>\S+)")
_ARROW = re.compile(r"^\s*(?:-+>|[│|]?\s*❱)\s*(?P<line>\d+)?\s*(?P<code>.*)")
_LIBRARY = re.compile(
    r"(?:site|dist)-packages/|/lib/python3|<frozen |^<(?!ipython|stdin)|torch_extensions/|/tmp/torchinductor|zerofit/"
)
# a launcher's own traceback says nothing about the program
_LAUNCHER = re.compile(r"torch/distributed/(?:run|launcher|elastic)\b|accelerate/commands/|deepspeed/launcher/")


@dataclass(frozen=True, slots=True)
class CodeFrame:
    """One call of a traceback."""

    file: str
    line: int
    name: str  # of the function
    code: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the call is in the user's code, not in a library."""
        return not _LIBRARY.search(self.file.replace("\\", "/"))

    @property
    def place(self) -> str:
        """File and line, like `train.py:44`. Paths of libraries start below site-packages."""
        path = re.sub(r"^.*(?:(?:site|dist)-packages|toolkit)/", "", self.file.replace("\\", "/"))
        return f"{path}:{self.line}" if self.line else path


def frames_before(lines: Sequence[LogLine], error: int) -> list[CodeFrame]:
    """Return the calls of the traceback that ends at line number `error`, outermost first.

    [] if there is none, or only a launcher's.
    """
    at = bisect_left(lines, error, key=lambda line: line.number)
    rank = lines[at].rank if at < len(lines) else ""
    found: list[CodeFrame] = []
    # read backwards, the code of a call comes before its place; notebooks and rich mark one of several lines
    code = arrow = ""
    number = 0
    for line in reversed(lines[max(0, at - LOOKED_BACK) : at]):
        if line.rank != rank:
            continue
        if TRACEBACK in line.text:
            break
        # _NOTEBOOK comes last: its loose pattern also matches lines of the other forms.
        match = CODE_LINE.match(line.text) or _RICH.match(line.text) or _CELL.match(line.text)
        match = match or _NOTEBOOK.match(line.text)
        if match:
            file, called = match["file"].strip(), (match["name"] or "").strip()
            found.append(CodeFrame(file, int(match["line"] or number), called, arrow or code))
            code, arrow, number = "", "", 0
        elif (marked := _ARROW.match(line.text)) and not arrow:
            arrow, number = marked["code"], int(marked["line"] or 0)
        elif line.text.strip(" ^~│|"):
            code = line.text.strip(" │|")
    return [] if found and _LAUNCHER.match(found[0].place) else found[::-1]


def own_frame(frames: Sequence[CodeFrame]) -> CodeFrame | None:
    """Return the innermost call in the user's code; None without user code."""
    return next((frame for frame in reversed(frames) if frame.is_own), None)


def caller_of_torch(frames: Sequence[CodeFrame]) -> CodeFrame | None:
    """Return the innermost call outside of torch and DeepSpeed, or else the innermost call."""
    outside = [frame for frame in frames if not frame.place.startswith(("torch/", "deepspeed/"))]
    return (outside or list(frames) or [None])[-1]


# phase -> pattern of a call: "file:function:code". Calls are read from the outermost on. Each matching call moves the
# run into its phase, except within a phase of `_INSIDE`: backward runs a forward again for checkpoints, and an
# evaluation runs a forward without backward. Lightning runs forward and backward inside of optimizer.step, so other
# calls may follow `step`.
_MARKS = {
    KEPT_LOGITS: r":nested_concat:|:_?pad_across_processes:|:gather_for_metrics:|preds_host|all_(?:logits|preds)"
    r"|EvalLoopContainer|trainer_pt_utils.py:.*(?:torch\.cat|torch_pad_and_concat)",
    EVALUATION: r":evaluate:|:evaluation_loop:|:prediction_(?:step|loop):|:(?:\w*_)?valid(?:ate|ation_step|ation)?:"
    r"|:(?:run_)?eval(?:_\w+)?:|:test_step:|:_run_sanity_check:|:predict:|:test:",
    GENERATION: r"generation/utils.py:|:generate:|\.generate\(",
    SAVING: r":_?save(?:_\w+)?:|:_zero3_consolidated_16bit_state_dict:|:_maybe_log_save_evaluate:.*save"
    r"|:get_state_dict:|:state_dict:|:consolidat\w+:",
    LOADING: r":from_pretrained:|:_?load_\w*(?:model|state|checkpoint|param)\w*:|:load_state_dict:|:load_checkpoint:"
    r"|torch/serialization.py:|/nn/modules/module.py:(?:to|cuda|_apply|half|float|bfloat16)\b|:_lazy_init:|:set_module_tensor"
    r"|(?:model|net|self)\.(?:to|cuda|half)\(|safetensors|:load_model\w*:|:_initialize_weights:|:reset_parameters:"
    r"|/nn/modules/\w+\.py:__init__:",
    INIT: r"deepspeed/__init__.py:initialize:|:_configure_(?:zero_)?optimizer:|:_prepare_deepspeed:|:prepare_model:"
    r"|:initialize_optimizer_states:|:_wrap_model:|:_setup_for_real_optimizer:|:_create_fp32_partitions:"
    r"|fully_sharded_data_parallel.py:__init__|distributed.py:__init__",
    DATA: r":pin_memory:|:_pin_memory_loop:|data/_utils/|:collate\w*:|:_?prepare_inputs?:|batch\.(?:to|cuda)\(",
    LOSS: r"loss/loss_utils.py:|cross_entropy|CrossEntropy|log_softmax|lm_head|logits|fused_linear",
    BACKWARD: r":backward:|\.backward\(|:_engine_run_backward:|:backward_pass:|:_execute_engine_|autograd.grad\(",
    STEP: r"(?:optim|adam|lion|muon|adafactor)\w*\.py:_?(?:multi_tensor|single_tensor|init_group|step|update)\w*"
    r"|:_take_model_step:|:_?optimizer_step:|:clip_grad_norm\w*:|optim/\w+\.py:|engine\.step\(|optimizer\.step\("
    r"|stage\w+\.py:step:|:_step\w*:|:unscale_\w*:",
    FORWARD: r":forward:|:_call_impl:|:_?training_step:|:compute_loss:|:_inner_training_loop:.*model\(|\bmodel\(",
}
_PATTERNS = {phase: re.compile(pattern) for phase, pattern in _MARKS.items()}
# Phases that last to the end of the traceback, and the phases that may follow within them
_INSIDE: dict[str, tuple[str, ...]] = {
    BACKWARD: (),
    EVALUATION: (KEPT_LOGITS, GENERATION, SAVING),
    GENERATION: (),
    INIT: (LOADING,),
    KEPT_LOGITS: (),
    LOADING: (),
    SAVING: (),
}


def phase_of(frames: Sequence[CodeFrame]) -> str:
    """Return the phase of training in which a traceback ended; "" if unknown."""
    phase = ""
    for frame in frames:
        text = f"{frame.file}:{frame.name.split('(')[0]}:{frame.code}".replace("\\", "/")
        for mark, pattern in _PATTERNS.items():
            if pattern.search(text):
                # A loss calls forwards of torch's modules, which must not end the phase.
                within_loss = phase == LOSS and mark == FORWARD and "/torch/" in text  # the forward of lm_head
                if not within_loss and (phase not in _INSIDE or mark in _INSIDE[phase]):
                    phase = mark
                break
    return phase


def fills_bucket(frames: Sequence[CodeFrame]) -> bool:
    """Return whether ZeRO was allocating a buffer that collects gradients for a reduction."""
    return any("reduce_bucket_size" in frame.code for frame in frames[-3:])


def gathers(frames: Sequence[CodeFrame]) -> bool:
    """Return whether ZeRO-3 or FSDP was gathering parameters."""
    marks = re.compile(r"partition(?:ed)?_param\w+\.py:|:_?all_?gather|:fetch_sub_module:|GatheredParameters|_unshard")
    return any(marks.search(f"{frame.file}:{frame.name}:{frame.code}") for frame in frames[-8:])
