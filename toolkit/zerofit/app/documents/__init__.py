"""The experiments of four teaching documents on parallel training, repeated. Each document is one module."""
