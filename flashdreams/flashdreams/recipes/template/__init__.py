"""The smallest complete integration: copy this package to add a model (docs: "Add a model")."""
