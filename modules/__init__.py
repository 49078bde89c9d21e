"""The `nn.Module`s, under the names and arguments of Transformer Engine."""
