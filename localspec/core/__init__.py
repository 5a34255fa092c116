"""Records that pass between the stages of a step. They hold tensors but compute nothing."""
