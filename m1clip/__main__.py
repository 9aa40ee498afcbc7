"""python -m m1clip"""

from m1clip.cli import main

if __name__ == "__main__":
    main()
