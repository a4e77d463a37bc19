"""Who survives under a memory limit, and how fast: loaders against real memory groups.

Covers: workloads (workloads.py), one contestant's process (job.py), running it in a group of
its own (run.py), and what is kept of it (outcome.py). Does not cover: the command
(cli/survive.py) or the page (observe/survive_page.py).
"""
