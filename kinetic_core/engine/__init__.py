"""The engine: one thread that owns the model, batches the rows of every running request and chooses tokens."""
