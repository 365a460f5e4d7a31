from hypothesis import settings

# The same cases in every run; `make test-long` draws fresh ones.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
