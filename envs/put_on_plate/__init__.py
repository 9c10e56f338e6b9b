"""The put-on-plate scenes of RL4VLA (Liu et al., 2025): which there are, how episodes begin, what they earn.

Not here: the scenes themselves, whose classes and assets are published elsewhere (`assets` says where).
"""
