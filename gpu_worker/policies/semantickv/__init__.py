"""SemanticKV: semantic voters, layer by layer."""
