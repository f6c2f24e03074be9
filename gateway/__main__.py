"""`python -m gateway` is the command `poolgate`: how `poolgate up` starts its children whatever PATH says."""

from gateway.entry import main

main()
