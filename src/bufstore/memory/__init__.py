"""In memory: for users' tests, and as the oracle of ours."""
