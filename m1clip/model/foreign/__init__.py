"""Weights of others: what they call a tensor, what they write into a config, and how both become ours and back."""
