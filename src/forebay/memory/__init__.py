"""How many bytes, whose, and how many more.

Covers: reading memory (`probe`, with `readings`, `kernel_files`, `cgroup` and
`peak` behind it), which limit binds (`limits`), who was promised what
(`ledger`), what to do about it (`policy`) and what fits before work starts
(`planner`).
Does not cover: holding memory (transport/) or making batches (workers/).

The one idea: memory is read in one place and decided in pure functions.
"""
