"""Does the discretization matter? README.md has the answer, protocol.md how it was found."""
