"""Wrappers around datasets that hold memory of their own, and a bound for it.

They stand beside the stairs: they use transport and memory, any loader can use them, and
nothing of the engine imports them.
"""
