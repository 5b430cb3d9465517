"""`python -m streamrl`: the command line without the console script."""

from streamrl.cli import main

if __name__ == "__main__":
    main()
