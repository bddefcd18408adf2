"""The experiments of four teaching documents on parallel training, repeated: one module a document."""
