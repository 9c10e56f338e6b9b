"""The workers of embodied training: env (simulation), rollout (inference) and actor (learning)."""
