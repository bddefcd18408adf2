"""Train with an Accelerate device map: naive model parallelism in one process."""

from accelerate import dispatch_model, infer_auto_device_map
from accelerate.utils import get_balanced_memory

from zerofit.compare.benchmark_task import BenchmarkTask, NotHereError, state_on_cpu

NEEDS = """needs two devices of the same kind, but this process has only one device. On a CPU, Accelerate offloads
the weights of the map's second device (cpu:1 or disk). Offloaded weights get no gradients, so they cannot be trained"""


def train(work: BenchmarkTask):
    """Train in an ordinary loop. The device map places the layers, and hooks move activations."""
    devices = work.devices
    if len(devices) < 2:
        raise NotHereError(" ".join(NEEDS.split()))
    model = work.model().cpu()
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    # 2 * size is only an upper limit, which get_balanced_memory lowers to an even share.
    memory = get_balanced_memory(model, dict.fromkeys(range(len(devices)), 2 * size))
    places = infer_auto_device_map(model, max_memory=memory)
    if len(set(places.values())) < len(devices) or {"cpu", "disk"} & set(places.values()):
        raise NotHereError(f"Accelerate's map does not spread such a small model over the devices: {places}")
    model = dispatch_model(model, places)
    optimizer = work.optimizer(model.parameters())
    for x, y in work.batches():
        optimizer.zero_grad()
        output = model(x)
        work.loss(output, y.to(getattr(output, "logits", output).device)).backward()
        optimizer.step()
    return state_on_cpu(model)
