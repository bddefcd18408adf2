"""Simulate one rank on fake tensors: the real DeepSpeed engine, or a user's script.

Each of these packages imports only packages that are listed above it:

    memory/    what was allocated: ledger, categories, host memory, torch's caching allocator
    ops/       what an op does: tracker, streams, FLOPs and scratch memory, shortcuts
    fakes/     replacements of the device, of its kernels, and of code that reads values
    costs/     costs of a model's layers without an engine: the profile for `zerofit plan`
    engine/    one rank of a run: trainer, phases, the heaviest rank of a group
    script/    one rank of a user's script
    forecast/  a whole run: ranks and layers to simulate, processes, verdict, result, changes to try

`record` defines the input and the output of a simulation's process. `endings` explains why a process left no
result.
"""
