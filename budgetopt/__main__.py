"""python -m budgetopt"""

import sys

from budgetopt._cli import main

if __name__ == "__main__":
    sys.exit(main())
