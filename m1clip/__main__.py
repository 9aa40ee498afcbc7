"""python -m m1clip"""

from __future__ import annotations

from m1clip.cli.main import main

if __name__ == "__main__":
    main()
