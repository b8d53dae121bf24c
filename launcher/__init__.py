"""The launcher of a node: starts the ranks of groups as the user who trains. Runs with the rights of that user only."""
