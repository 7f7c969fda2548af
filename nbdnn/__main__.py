"""``python -m nbdnn`` is the `nbdnn` command."""

import sys

from nbdnn.cli import main

sys.exit(main())
