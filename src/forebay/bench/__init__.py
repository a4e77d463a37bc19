"""Workloads, contestants and the measuring that is done from outside.

Covers: running a training job in a memory cgroup of its own (`cgroup`), reading
what it holds every 10 ms (`sampler`), the photographs and the model of the demo
(`photos`, `resnet`) and one contestant's process (`demo_job`).
Does not cover: what is shown and where (cli/ and observe/ do that).

Stands beside the stairs: the engine never imports it. The one idea: a number
about a loader is taken by somebody else than the loader.
"""
