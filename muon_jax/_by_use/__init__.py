"""Routing by use: which parameters are matrices, read off the jaxpr of the model."""
