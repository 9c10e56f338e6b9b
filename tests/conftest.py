"""What all tests share."""

from hypothesis import settings

# The same examples in every run: what is found is found by all. Others with --hypothesis-seed=NUMBER.
settings.load_profile("ci")
