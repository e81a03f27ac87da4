"""python -m budgetopt"""

import sys

from budgetopt._cli import main

sys.exit(main())
