"""Stacks of matrices in, polar factors out: knows no parameters, trees or meshes."""
