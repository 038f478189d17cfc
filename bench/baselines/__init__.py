"""The baselines: what people would use instead, each as good as its design allows, and the limits of the parts."""
