"""Print the reference: ``python -m holdfast.api > docs/reference/rest.md``."""

import sys

from holdfast.api.reference import markdown_page
from holdfast.api.routes import GROUPS

sys.stdout.write(markdown_page(GROUPS))
