"""`python -m workers.fake_engine serve MODEL …`, for tests that have no console script."""

from workers.fake_engine.process import main

if __name__ == "__main__":
    main()
