"""Reinforcement learning of robot policies: the platform that a user calls.

Importing this package imports nothing else of it; simulators, torch and Ray load where they are used.
"""
