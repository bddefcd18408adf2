"""Samples, their order and batches; sources of images, tables and text, and their caches."""
