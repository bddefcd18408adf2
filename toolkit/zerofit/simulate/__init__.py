"""Simulate one rank of N: the real DeepSpeed engine, or a user's script, on fake tensors.

Its packages. Each imports only packages above it:

    memory/    what was allocated: ledger, categories, host memory, torch's caching allocator
    ops/       what an op does: tracker, streams, FLOPs and scratch memory, shortcuts
    fakes/     what replaces the device, its kernels and what reads values
    costs/     costs of a model's layers without an engine: the profile for `zerofit plan`
    engine/    one rank of a run: trainer, phases, the heaviest rank of a group
    script/    one rank of a user's script
    forecast/  a whole run: which ranks and layers, in which processes; verdict, result, changes to try

`record` is the data that enters and leaves a simulation's process. `endings` explains why a process left no result.
"""
