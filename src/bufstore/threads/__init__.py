"""The ThreadRunStore domain: what entries mean."""
