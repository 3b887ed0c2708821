"""The toy family for Kinetic: `architecture` is the forward pass, `tiny` its miniatures, `plugin` registers it."""
