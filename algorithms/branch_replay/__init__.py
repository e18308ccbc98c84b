"""Branch replay: the exact gradient of a group of branches that share a long prompt.

Imports nothing, so that configs load without torch. Start reading at `replay.py`.
"""
